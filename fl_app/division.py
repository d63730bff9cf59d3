"""The division of the training examples: every client draws the same one and takes its own part."""

from __future__ import annotations

import torch

from fl_app.config import AppConfig
from fl_app.data import Split, clients_share, partition
from fl_app.data.partitions import BY_DOMAIN
from strategies.core.errors import DataError, OptionError


def own_positions(split: Split, config: AppConfig, *, partition_id: int, num_partitions: int) -> torch.Tensor:
    """Return one client's positions in a training set; every client draws the same division.

    Raises:
        OptionError: The settings do not fit the data set.
        DataError: A number of the partition is out of range, or the set cannot be divided by these settings.
    """
    config.data.check_holders(by_client=split.by_client)
    if num_partitions < 1:
        raise DataError(f"num-partitions is {num_partitions}: must be at least 1")
    if not 0 <= partition_id < num_partitions:
        raise DataError(f"partition-id is {partition_id}: must be 0 to {num_partitions - 1}")
    chosen = clients_share(split, seed=config.seed, limit=config.data.limit, proxy=config.data.proxy)
    spec = config.data
    try:
        parts = partition(
            split.labels[chosen].numpy(),
            spec,
            num_clients=num_partitions,
            num_classes=split.num_classes,
            seed=config.seed,
            domains=None if split.domains is None else split.domains[chosen].numpy(),
        )
    except (DataError, OptionError):
        if num_partitions > 1 or spec.partition == BY_DOMAIN:
            raise
        return chosen  # a refusal would tell the server of the node's sizes and classes
    mine = chosen[torch.from_numpy(parts[partition_id])]
    # The data of a node without others are its own, also under a partition that hands out a part.
    return chosen if num_partitions == 1 and len(mine) < len(chosen) else mine
