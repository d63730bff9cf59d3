"""Who a client is, and what the server asks it; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_app.node_config import client_name
from strategies.client import CLIENT_NAME
from strategies.core.errors import UploadError

if TYPE_CHECKING:
    from fl_app.config import AppConfig


@dataclass(frozen=True)
class Node:
    """Who this client is.

    Attributes:
        client: Its stable name.
        partition_id: Which part of the training set is its own.
        num_partitions: Among how many the training set is divided.
        architecture: Its model.
        checkpoint: Where its pretrained model lies; empty if it trains.
        data_root: Its own data folder; empty for the app's setting.
        has_data: Whether it holds training examples at all.
    """

    client: str
    partition_id: int
    num_partitions: int
    architecture: str
    checkpoint: str
    data_root: str
    has_data: bool

    @classmethod
    def of(cls, facts: Mapping[str, Any], config: AppConfig) -> Node:
        """Read what :func:`fl_app.node_config.node_facts` returned; the app's settings give the rest.

        Raises:
            UploadError: Its name is none: the server would refuse what it trains.
        """
        client = client_name(facts)
        if not CLIENT_NAME.fullmatch(client):
            raise UploadError(f"client is {client[:80]!r}: must be names that match {CLIENT_NAME.pattern}")
        partition_id = int(facts.get("partition-id", 0))
        return cls(
            client=client,
            partition_id=partition_id,
            num_partitions=int(facts.get("num-partitions", 1)),
            architecture=str(facts.get("architecture", "")) or config.model.of_client(partition_id),
            checkpoint=str(facts.get("checkpoint", "")) or config.client.checkpoint,
            data_root=str(facts.get("data-root", "")) or config.data.root,
            has_data="partition-id" in facts or "data-root" in facts,
        )


@dataclass(frozen=True)
class Asked:
    """What the server's request says beside the weights; another strategy's request may say none of it.

    Attributes:
        run_id: The run folder's id; empty if the server keeps no run, then nothing is kept here either.
        server_round: From 1.
        seed: Of the run.
        holdout: Share of its examples that the client keeps for what follows the upload, in [0, 1).
        per_class: Whether it keeps that share of each class, or of all at random.
        calibrate: Whether it sends the ranges of its activations with its model.
        task: What it trains and sends: a key of :data:`client_app.tasks.TASKS`.
    """

    run_id: str
    server_round: int
    seed: int
    holdout: float = 0.0
    per_class: bool = False
    calibrate: bool = False
    task: str = "classifier"

    @classmethod
    def of(cls, said: Mapping[str, Any], seed: int) -> Asked:
        """Read a request's config; ``seed`` is the app's own, for a server that names none."""
        return cls(
            str(said.get("run-id", "")),
            int(said.get("server-round", 1)),
            int(said.get("seed", seed)),
            float(said.get("holdout", 0.0)),
            bool(said.get("holdout-per-class", False)),
            bool(said.get("calibrate", False)),
            str(said.get("task", "classifier")),
        )
