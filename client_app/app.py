"""The ClientApp: train or load a model, upload it once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from safetensors import SafetensorError

from client_app.keeping import Keep, Trained
from client_app.local_training import Epoch, train
from client_app.pretrained import checkpoint_path, load_checkpoint
from fl_app.config import AppConfig
from fl_app.data import Split, clients_share, open_split, partition
from fl_app.models import build
from strategies.client import CLIENT_NAME, already_held, failure, upload_facts
from strategies.errors import DataError, OneShotError, UploadError
from strategies.seeds import derive_seed, seeded_torch

app = ClientApp()

# A simulated client's process serves many clients: the data set is opened once.
cached_split = functools.lru_cache(maxsize=2)(open_split)


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
        has_data: Whether it holds training images at all.
    """

    client: str
    partition_id: int
    num_partitions: int
    architecture: str
    checkpoint: str
    data_root: str
    has_data: bool

    @classmethod
    def of(cls, context: Context, config: AppConfig) -> Node:
        """Read the node's config; in simulation it is the partition alone, and the app's settings give the rest.

        Raises:
            UploadError: Its name is none: the server would refuse what it trains.
        """
        facts, client = context.node_config, client_name(context)
        if not CLIENT_NAME.fullmatch(client):
            raise UploadError(f"client is {client[:80]!r}: allowed are names that match {CLIENT_NAME.pattern}")
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
    """

    run_id: str
    server_round: int
    seed: int

    @classmethod
    def of(cls, msg: Message, config: AppConfig) -> Asked:
        """Read a request."""
        said: dict[str, Any] = dict(msg.content.config_records.get("config", {}))
        return cls(str(said.get("run-id", "")), int(said.get("server-round", 1)), int(said.get("seed", config.seed)))


def client_name(context: Context) -> str:
    """Return a node's stable name: the one in its config, else that of its partition."""
    facts = context.node_config
    return str(facts.get("client", f"client-{int(facts.get('partition-id', 0)):03d}"))


@app.train()
def upload(msg: Message, context: Context) -> Message:
    """Answer the server's one question with a trained model."""
    name = client_name(context)
    if (reply := already_held(msg, client=name)) is not None:
        return reply
    try:
        config = AppConfig.from_settings(context.run_config)
        node = Node.of(context, config)
        torch.set_num_threads(1)
        return _upload(msg, config, node)
    except OneShotError as error:
        return failure(msg, client=name, reason=str(error))


def _upload(msg: Message, config: AppConfig, node: Node) -> Message:
    path = checkpoint_path(node.checkpoint, client=node.client, partition_id=node.partition_id)
    if path is not None:
        return _reply(msg, config, node, _facts_of_pretrained(config, node), load_checkpoint(path))
    asked = Asked.of(msg, config)
    if not asked.run_id:
        return _reply(msg, config, node, *_train(msg, config, node, asked))
    keep = Keep(config.client.state_dir, asked.run_id, node.client, asked.server_round)
    kept = keep.load()
    if kept is None:
        kept = _train(msg, config, node, asked)
        try:
            keep.save(*kept)
        except (OSError, SafetensorError) as error:  # what is trained is worth more than its copy
            log(WARNING, "%s: what it trained is sent but not kept here: %s", node.client, error)
    return _reply(msg, config, node, *kept)


def _train(msg: Message, config: AppConfig, node: Node, asked: Asked) -> tuple[Trained, dict[str, torch.Tensor]]:
    split = _split(config, node)
    positions = _positions(split, config, node)
    data = split.take(positions)
    # Clients of one architecture start from the same weights, unless they shall not, without a byte sent for it.
    own = (node.client,) if config.client.init == "different" else ()
    with seeded_torch(asked.seed, "init", node.architecture, *own):
        model = build(node.architecture, num_classes=split.num_classes, input_shape=split.input_shape)
    _load_start(model, msg.content.array_records.get("arrays", ArrayRecord()))

    def report(epoch: Epoch) -> None:
        if epoch.number in (1, config.client.epochs) or epoch.number % 10 == 0:
            of = f"epoch {epoch.number} of {config.client.epochs}"
            log(INFO, "%s: %s, loss %.3f, accuracy %.1f %%", node.client, of, epoch.loss, 100 * epoch.accuracy)

    last = train(
        model,
        data,
        config.client,
        normalization=split.normalization,
        augmentation=split.augmentation if config.client.augmentation == "data-set" else config.client.augmentation,
        seed=derive_seed(asked.seed, "client", node.client, asked.server_round),
        report=report,
    )
    trained = Trained(node.architecture, len(positions), _counts(split, positions), last.loss, last.accuracy)
    return trained, model.state_dict()


def _split(config: AppConfig, node: Node) -> Split:
    data = config.data
    return cached_split(data.name, "train", root=node.data_root, image_size=data.image_size, left_out=data.left_out)


def _positions(split: Split, config: AppConfig, node: Node) -> torch.Tensor:
    """Return the positions of this client's training images; every client draws the same division."""
    if not 0 <= node.partition_id < node.num_partitions:
        raise DataError(f"partition-id is {node.partition_id}: allowed is 0 to {node.num_partitions - 1}")
    chosen = clients_share(split, seed=config.seed, limit=config.data.limit, proxy=config.data.proxy)
    parts = partition(
        split.labels[chosen].numpy(),
        config.data.partition_spec(),
        num_clients=node.num_partitions,
        num_classes=split.num_classes,
        seed=config.seed,
        domains=None if split.domains is None else split.domains[chosen].numpy(),
    )
    return chosen[torch.from_numpy(parts[node.partition_id])]


def _counts(split: Split, positions: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.bincount(split.labels[positions], minlength=split.num_classes).tolist())


def _load_start(model: torch.nn.Module, start: ArrayRecord) -> None:
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if wanted == {key: tuple(array.shape) for key, array in start.items()}:
        model.load_state_dict(start.to_torch_state_dict())


def _facts_of_pretrained(config: AppConfig, node: Node) -> Trained | None:
    """Count the examples that its data folder holds; a node may hold nothing but its checkpoint."""
    if not node.has_data:
        return None
    split = _split(config, node)
    positions = _positions(split, config, node)
    return Trained(node.architecture, len(positions), _counts(split, positions), float("nan"), float("nan"))


def _reply(
    msg: Message, config: AppConfig, node: Node, trained: Trained | None, state: dict[str, torch.Tensor]
) -> Message:
    counts = trained.label_counts if trained is not None and config.client.share_label_counts else None
    metrics = MetricRecord()
    if trained is not None:
        metrics["num-examples"] = trained.num_examples
        if trained.loss == trained.loss:
            metrics["train-loss"], metrics["train-accuracy"] = trained.loss, trained.accuracy
    # What was kept is what it was when it was trained.
    architecture = trained.architecture if trained is not None else node.architecture
    facts: ConfigRecord = upload_facts(
        client=node.client, architecture=architecture, label_counts=counts, pretrained=bool(node.checkpoint)
    )
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics, "upload": facts})
    return Message(content, reply_to=msg)
