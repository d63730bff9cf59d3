"""The checks of `oneshot run` on the nodes that it will simulate, ``client.nodes``, before it starts any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from fl_app.data import Split, check_request, clients_share
from fl_app.models import ARCHITECTURES, HEAD_FORM, known_name
from fl_app.node_config import checkpoint_path, client_name, read_nodes
from strategies.core.errors import OptionError
from strategies.core.options import OWN_FORM
from strategies.core.places import expanded

DEFAULT_SUPERNODES = 5


def number_of_clients(app: AppConfig) -> int:
    """Return the number of simulated clients if no option gives one.

    Raises:
        OptionError: "client.nodes" holds no valid nodes; see :func:`fl_app.node_config.read_nodes`.
    """
    return len(read_nodes(Path(app.client.nodes))) if app.client.nodes else DEFAULT_SUPERNODES


def check_division(app: AppConfig, train: Split, num_supernodes: int) -> None:
    """Refuse a number of clients or a division of the data that is impossible, before half a minute of start-up.

    Args:
        app: The app's settings.
        train: The training half of the data set. Nodes with a data root of their own have other images, which are not
            read.
        num_supernodes: The number of simulated clients.

    Raises:
        OptionError: The training set cannot be divided so, "client.nodes" has fewer nodes, or one of them is invalid.
    """
    app.data.check_holders(by_client=train.by_client)
    for num_clients in sorted(_divisions(app, num_supernodes)):
        _check_clients(app, train, num_clients)


def check_checkpoints(app: AppConfig, num_supernodes: int) -> None:
    """Refuse a run with too few pretrained models; one missing model only costs its own upload.

    Args:
        app: The app's settings; a run that already has its uploads passes.
        num_supernodes: The number of simulated clients.

    Raises:
        OptionError: Fewer than "min-uploads" clients train a model or find theirs.
    """
    if app.resume or app.uploads:
        return
    missing = [path for path in _checkpoints(app, num_supernodes) if not path.is_file()]
    if num_supernodes - len(missing) < app.min_uploads:
        raise OptionError(
            f"{len(missing)} of the {num_supernodes} clients' checkpoints are missing, {missing[0]} is the first "
            f"('client.checkpoint'): at least {app.min_uploads} clients ('min-uploads') must have a model"
        )


def _checkpoints(app: AppConfig, num_supernodes: int) -> list[Path]:
    """Return the files that the clients would upload; a client that trains has no file."""
    nodes: list[dict[str, Any]] = [{"partition-id": number} for number in range(num_supernodes)]
    if app.client.nodes:
        nodes = read_nodes(Path(app.client.nodes))[:num_supernodes]
    named = [
        checkpoint_path(
            facts.get("checkpoint") or app.client.checkpoint,
            client=client_name(facts),
            partition_id=facts.get("partition-id", 0),
        )
        for facts in nodes
    ]
    return [expanded(path) for path in named if path is not None]


def _divisions(app: AppConfig, num_supernodes: int) -> set[int]:
    if not app.client.nodes:
        return {num_supernodes}
    nodes = read_nodes(Path(app.client.nodes))
    if num_supernodes > len(nodes):
        raise OptionError(
            f"--num-supernodes is {num_supernodes}: must be at most {len(nodes)}, the nodes of {app.client.nodes}"
        )
    found = set()
    for number, facts in enumerate(nodes[:num_supernodes]):
        where = f"client.nodes: node {facts.get('client', number)}"
        name, part, parts = (facts.get(key) for key in ("architecture", "partition-id", "num-partitions"))
        if name and not known_name(name, sums=True):
            forms = f"{', '.join(ARCHITECTURES)}, {HEAD_FORM}, or {OWN_FORM}"
            raise OptionError(f"{where}: architecture is {name!r}: must be {forms}")
        if part is not None and not 0 <= part < (parts or 1):
            raise OptionError(f"{where}: partition-id is {part}: must be 0 to {(parts or 1) - 1}")
        if part is not None and "data-root" not in facts:
            found.add(parts or 1)
    return found


def _check_clients(app: AppConfig, train: Split, num_clients: int) -> None:
    shared = clients_share(train, seed=app.seed, limit=app.data.limit, proxy=app.data.proxy)
    if num_clients > len(shared):
        raise OptionError(
            f"--num-supernodes is {num_clients}: must be at most {len(shared)}, one training image per client"
        )
    check_request(
        train.labels[shared].numpy(),
        app.data.partition_spec(),
        num_clients=num_clients,
        num_classes=train.num_classes,
        domains=None if train.domains is None else train.domains[shared].numpy(),
    )
