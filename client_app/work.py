"""A client's own examples, and the model that it sends.

This module imports no Flower. ``client_app/app.py`` imports it only for messages that need it, because a deployed
client starts a new process for every message.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from client_app.attacking import check_trains, choose_victim, exaggerate_claims, poison, scale_last_layer, scale_weights
from client_app.keeping import KeptModel, Trained
from client_app.node import Node, TrainRequest, check_question, check_shares_counts, refuse, reports_counts
from client_app.tasks import Wanted, task_of
from client_app.training.features import ClientSums, check_enough
from client_app.training.local import Epoch, Training, epoch_lengths, train_by
from fl_app.config import AppConfig
from fl_app.data import ImageData, Normalization, Split, holds_test_half, normalize, open_data
from fl_app.data.folders import Read
from fl_app.division import own_positions
from fl_app.feature_cache import FeatureCache
from fl_app.ledger import Ledger
from fl_app.models.features import as_read, readers_of
from fl_app.models.huggingface import folder_digest
from fl_app.models.uploaded import uploaded_name
from fl_app.node_config import checkpoint_path
from fl_app.node_policy import NodePolicy
from strategies.client import start_digest
from strategies.client.holdout import held_out, split_test
from strategies.client.measures import MOST, calibrate, fisher_diagonal, gram_matrices
from strategies.core import refusals
from strategies.core.checkpoints import read_checkpoint, read_classes
from strategies.core.errors import UploadError, shorten_list
from strategies.core.facts import (
    CLASSIFIER,
    STATISTICS,
    Agreed,
    Agreement,
    UploadFacts,
    backbone_in,
    is_head,
    kind_of,
    part_of,
)
from strategies.core.places import expand_user, state_root
from strategies.core.processor import flush_subnormals
from strategies.core.scan import LOG
from strategies.core.seeds import derive_seed, generator, initial_torch, seeded_torch

State = dict[str, torch.Tensor]

# The range of activations over this many examples is close to that over all, and takes seconds with the largest model.
EXAMPLES = 512
BATCH = 128

# Stands for a training without loss and accuracy, or for no training.
NO_METRICS = Epoch(0, float("nan"), float("nan"))

# A simulation's process serves many clients, and opens the data set once.
cached_split = functools.lru_cache(maxsize=2)(open_data)


@dataclass(frozen=True)
class LocalExamples:
    """A client's own examples.

    Attributes:
        held: Positions that are held out for requests after the upload.
        test: Positions in ``tested`` that results are scored on at the end.
        own_test: The node's own test half; None if the test examples are a share of the training half.
    """

    split: Split
    train: torch.Tensor
    held: torch.Tensor
    test: torch.Tensor
    own_test: Split | None = None

    @property
    def tested(self) -> Split:
        """The half that the test positions are in."""
        return self.split if self.own_test is None else self.own_test

    @property
    def label_counts(self) -> tuple[int, ...]:
        """The client's training examples per class [C]."""
        labels = self.split.labels[self.train]
        return tuple(torch.bincount(labels, minlength=self.split.num_classes).tolist())


def load_examples(config: AppConfig, node: Node, request: TrainRequest) -> LocalExamples:
    """Return a client's examples; every client draws the same division.

    Raises:
        DataError: The data set is missing, or cannot be divided by these settings.
        UploadError: The server has other classes, another input, or another folder of the client's model; or the policy
            does not permit the backbone of the texts, or privacy does not permit to draw examples.
    """
    data = config.data
    node.policy.check_source(data.name)
    wanted = request.folders.get(node.architecture)
    if wanted is not None and (found := folder_digest(node.architecture)) != wanted:
        raise refusals.other_folder(node.architecture, found, wanted)
    if config.privacy.on and node.policy.deployed and (drawn := data.limit or data.proxy):
        # One example more or less would exchange most of those that are drawn, which no noise hides.
        key = "limit" if data.limit else "proxy"
        raise refusals.not_permitted(f"data.{key}", f"{drawn:g}", "0 with 'privacy.epsilon' on a deployed node")
    what = f"data set {data.name!r}"

    def opened(half: str) -> Split:
        with node.policy.reading(what):
            split = cached_split(data, half, root=node.data_root, targets=bool(config.model.train))
        split = replace(split, read=functools.partial(_read, node.policy, what, split.read))
        if split.texts is None:
            return split
        models = () if request.task == STATISTICS else (*config.model.all_named(), node.architecture)
        for reader in readers_of(config.features, models):
            node.policy.check_backbone(reader, config.features.weights)
        return as_read(split, config.features, models)

    split, own_test = opened("train"), None
    # A folder that several parties divide is no node's own, and its test half may be the server's.
    own = bool(request.test_share) and node.data_root != data.root and node.num_partitions == 1
    if own and holds_test_half(data, node.data_root):
        own_test = opened("test")
    _check_expected(request.expected, split.agreement, node, shows=reports_counts(config.client, node.policy))
    positions = own_positions(split, config, partition_id=node.partition_id, num_partitions=node.num_partitions)
    groups = None if split.groups is None else split.groups[positions].numpy()
    if own_test is None:
        kept, tested = split_test(
            split.labels[positions].numpy(), client=node.client, share=request.test_share, groups=groups
        )
        test, positions = positions[torch.from_numpy(tested)], positions[torch.from_numpy(kept)]
    else:
        test = torch.arange(len(own_test.labels))
    labels = split.labels[positions].numpy() if request.per_class else None
    groups = None if split.groups is None else split.groups[positions].numpy()
    parts = held_out(
        len(positions), client=node.client, seed=request.seed, share=request.holdout, labels=labels, groups=groups
    )
    train, held = (positions[torch.from_numpy(part)] for part in parts)
    return LocalExamples(split, train, held, test, own_test)


def _check_expected(expected: Agreement, own: Agreement, node: Node, *, shows: bool) -> None:
    """Refuse a request of a server with other classes or another input, before any work is done for it."""
    agreed = Agreed(expected)
    try:
        agreed.check(own)
    except UploadError as error:
        LOG.error("%s: %s", node.client, error)
        if not shows:  # the names of a node's own class folders would tell which classes it has
            agreed.check(own.without_words())
        raise


def copies_in(own: LocalExamples, data: ImageData) -> list[int]:
    """Return the positions of the test examples whose bytes are those of a training example."""
    if not len(own.test):
        return []
    trained = {row.numpy().tobytes() for row in data.images}
    tested = zip(own.test.tolist(), own.tested.take(own.test).images, strict=True)
    return [position for position, row in tested if row.numpy().tobytes() in trained]


def _say_tests(node: Node, own: LocalExamples, data: ImageData) -> None:
    """Log a test half of the node's own, and test examples that training has seen."""
    if own.own_test is not None:
        LOG.info(
            "%s: scores are of its own test half, %d examples, not of 'client.test-share'", node.client, len(own.test)
        )
    if copies := copies_in(own, data):
        files = own.tested.files
        named = shorten_list([files[k] if files else f"row {k + 1}" for k in copies])
        LOG.warning(
            "%s: %d of %d test examples are equal to a training example, so their scores say nothing of new ones: %s",
            node.client, len(copies), len(own.test), named,
        )  # fmt: skip


def _read(policy: NodePolicy, what: str, read: Read, positions: torch.Tensor) -> torch.Tensor:
    """Decode examples; a deployed node does not say which of its files is damaged."""
    with policy.reading(what):
        return read(positions)


@flush_subnormals()
def prepare_upload(config: AppConfig, node: Node, request: TrainRequest, start: State) -> tuple[Trained, State]:
    """Return the model that a client sends: pretrained, kept from an earlier request, or trained now.

    Returns:
        The facts of its training, and the part of its weights that the task sends.

    Raises:
        OneShotError: The data set, architecture or file is missing, or the node's policy does not permit the upload.
    """
    sent = task_of(request.task).sent  # an unknown task is refused first
    name = uploaded_name(request.task, node.architecture)
    path = checkpoint_path(node.checkpoint, client=node.client, partition_id=node.partition_id)
    check_question(config.privacy, request)
    if is_head(name) or kind_of(name) == STATISTICS:
        node.policy.check_backbone(backbone_in(name) or config.features.backbone, config.features.weights)
    node.policy.check_private(config.privacy.epsilon)
    if kind_of(name) == STATISTICS and not config.privacy.on:
        check_shares_counts(config.client, node.policy, what="sums of features: needs 'privacy.epsilon' above 0")
    if path is not None:
        check_trains(config.attack, node.client)
        refuse(config.privacy, "this node's checkpoint")
        with node.policy.reading("the checkpoint"):
            state, classes = load_checkpoint(expand_user(path)), read_classes(expand_user(path))
            named = Agreement.of_file(classes, request.expected)
        _check_expected(request.expected, named, node, shows=reports_counts(config.client, node.policy))
        facts = UploadFacts(node.client, name, pretrained=True, agreement=named)
        if node.has_data:  # a node may hold nothing but its checkpoint
            own = load_examples(config, node, request)
            counts, agreement = own.label_counts, own.split.agreement
            with node.policy.reading("the checkpoint"):
                Agreed(agreement, "this node's data").check(Agreement.of_file(classes, agreement))
            facts = replace(facts, num_examples=len(own.train), label_counts=counts, agreement=agreement)
        return Trained(facts), state
    trained, whole = _load_or_train(config, node, request, start)
    return trained, part_of(whole, sent)


def _load_or_train(config: AppConfig, node: Node, request: TrainRequest, start: State) -> tuple[Trained, State]:
    """Return the whole model of a client, kept from an earlier request or trained now."""
    if not request.run_id:
        return _train(config, node, request, start)
    keep = KeptModel(node.state_dir, request.run_id, node.client, request.server_round)
    if (kept := keep.load()) is not None:
        node.policy.check_private(kept[0].epsilon or 0.0)
        return kept
    if config.privacy.on and keep.finished:
        raise refusals.spent_twice()
    return _train_and_keep(config, node, request, keep=keep, start=start)


def _train_and_keep(
    config: AppConfig, node: Node, request: TrainRequest, *, keep: KeptModel, start: State
) -> tuple[Trained, State]:
    """Train, enter the upload into the privacy ledger, and keep the model."""
    ledger = Ledger.of(state_root(node.state_dir), node.client)
    mu = config.privacy.mu if config.privacy.on and _sends_sums(node, request) else None
    ledger.check(config.privacy, node.policy, mu=mu)
    made = _train(config, node, request, start)
    # A killed SuperNode may leave a process that still trains; the model kept first may have been sent.
    if config.privacy.on and (kept := keep.load()) is not None:
        return kept
    ledger.enter(config.privacy, node.policy, run=request.run_id, server_round=request.server_round, mu=mu)
    try:
        keep.save(*made)
    except (OSError, SafetensorError) as error:  # the model is sent without a kept copy
        if config.privacy.on:  # unless privacy is on, because a second training would spend it again
            raise refusals.not_kept("the trained model", error, "it is not sent") from error
        place, why = state_root(node.state_dir), getattr(error, "strerror", "") or error
        LOG.warning("%s: the trained model is sent but cannot be kept in %s: %s", node.client, place, why)
    return made


def _train(config: AppConfig, node: Node, request: TrainRequest, start: State) -> tuple[Trained, State]:
    """Return the model that a client trains on its own examples, or on another's if it is an attacker that copies."""
    if config.attack.of(node.client) != "copy":
        return _train_as(node, config, request, start)
    trained, state = _train_as(choose_victim(node, config), config, request, start)
    own = load_examples(config, node, request)
    facts = replace(trained.facts, client=node.client, num_examples=len(own.train), label_counts=own.label_counts)
    return replace(trained, facts=facts), state


def _train_as(node: Node, config: AppConfig, request: TrainRequest, start: State) -> tuple[Trained, State]:
    """Train the model of this client on its examples."""
    own, attack = load_examples(config, node, request), config.attack.of(node.client)
    task = task_of(request.task, node.architecture)
    if _sends_sums(node, request):
        check_enough(len(own.train), config.features.min_examples, node.client)
    split, classes = own.split, own.split.num_classes
    data = split.take(own.train)
    _say_tests(node, own, data)
    data = poison(data, config.attack, client=node.client, num_classes=classes, seed=request.seed)
    model, last, epsilon = _build_untrained(config, node, request, split), NO_METRICS, None
    reported: Mapping[str, float] = {}
    training = Training(
        data,
        node.training(config.client),
        split.normalization,
        augmentation_of(config, split),
        derive_seed(request.seed, "client", node.client, request.server_round),
        reporter(config, node, len(own.train)),
    )
    began: str | None = None
    if attack != "random":
        _load_start(model, start)
        if request.task == CLASSIFIER and not isinstance(model, ClientSums):
            began = start_digest(model.state_dict())
        if by := config.model.train:
            refuse(config.privacy, "a training by 'model.train', which adds no noise")
            reported = _train_by(by, model, own, training, node, began)
        elif config.privacy.on:
            epsilon = task.train_privately(model, training, config.privacy)
        else:
            last = task.train(model, training)
    if attack == "scale":
        model.load_state_dict(scale_weights(model.state_dict(), config.attack.factor))
    elif attack == "last-layer":
        scale_last_layer(model, config.attack.factor)
    name = uploaded_name(request.task, node.architecture)
    calibrates = request.calibrate and task.calibrates
    ranges = activation_ranges(model, data, split.normalization, seed=request.seed) if calibrates else None
    size, counts = len(own.train), own.label_counts
    if isinstance(model, ClientSums):  # an example without features is not in the sums
        size, counts = model.examples, counts if config.privacy.on else model.label_counts
    facts = UploadFacts(node.client, name, size, counts, ranges=ranges, agreement=split.agreement, start=began)
    facts = exaggerate_claims(facts, config.attack)
    state = model.state_dict()
    if request.sums:
        state |= measure(model, data, split.normalization, request)
    return Trained(facts, last.loss, last.accuracy, epsilon, reported), state


def _train_by(
    by: str, model: torch.nn.Module, own: LocalExamples, training: Training, node: Node, began: str | None
) -> dict[str, float]:
    """Train a model in place by the function that ``model.train`` names, and return the numbers that it reports.

    Args:
        began: The digest of the model's weights before.
    """
    pairs = own.split.pairs(own.train, training.data)
    node.policy.check_code("model.train", by)
    with node.policy.reading(f"model.train {by!r}"):
        reported = train_by(by, model, pairs, training.config, seed=training.seed)
    LOG.info("%s: trained by %s%s", node.client, by, "".join(f", {k} {v:g}" for k, v in reported.items()))
    if start_digest(model.state_dict()) == began:
        LOG.warning("%s: %s changed no weight: must train the model that it gets, in place", node.client, by)
    return reported


def _sends_sums(node: Node, request: TrainRequest) -> bool:
    """Return whether the client's upload is sums of features: by the task, or by its own architecture."""
    return kind_of(uploaded_name(request.task, node.architecture)) == STATISTICS


def _build_untrained(config: AppConfig, node: Node, request: TrainRequest, split: Split) -> torch.nn.Module:
    """Return the untrained model."""
    # The seed gives clients of one architecture the same start weights without sending any, unless client.init differs.
    seeded = initial_torch(
        request.seed, node.architecture, *([node.client] if config.client.init == "different" else [])
    )
    if config.attack.of(node.client) == "random":
        seeded = seeded_torch(request.seed, "attack", "random", node.client, request.server_round)
    with seeded:
        most = node.policy.cache_mib(config.features.cache_mib) if request.run_id else 0.0
        cache = FeatureCache(state_root(node.state_dir) / "features", most) if most else None
        name = node.architecture if request.task != STATISTICS else STATISTICS
        wanted = Wanted(name, split.num_classes, split.input_shape, split.normalization, config, cache)
        return task_of(request.task, node.architecture).build(wanted)


def reporter(config: AppConfig, node: Node, examples: int) -> Callable[[Epoch], None]:
    """Return the function that logs the first, the last and every tenth epoch of a training."""
    epochs = len(epoch_lengths(config.client, examples))

    def report(epoch: Epoch) -> None:
        if epoch.number in (1, epochs) or epoch.number % 10 == 0:
            of = f"epoch {epoch.number} of {epochs}"
            loss = "" if math.isnan(epoch.loss) else f", loss {epoch.loss:.3f}"
            right = "" if math.isnan(epoch.accuracy) else f", accuracy {100 * epoch.accuracy:.1f} %"
            LOG.info("%s: %s%s%s", node.client, of, loss, right)

    return report


def augmentation_of(config: AppConfig, split: Split) -> str:
    """Return the augmentation of a client's training images: a key of :data:`fl_app.data.AUGMENTATIONS`."""
    return split.augmentation if config.client.augmentation == "data-set" else config.client.augmentation


def _load_start(model: torch.nn.Module, start: State) -> None:
    """Load the server's start weights if they fit the client's architecture."""
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if wanted == {key: tuple(value.shape) for key, value in start.items()}:
        model.load_state_dict(start)


def activation_ranges(
    model: nn.Module, data: ImageData, normalization: Normalization, *, seed: int
) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest output of each layer on at most :data:`EXAMPLES` examples, for INT8.

    Args:
        model: On the CPU; left unchanged.
        normalization: Of the pixels, before the model.
        seed: Fixes which examples are used, if there are more.

    Returns:
        Layer name -> (smallest, largest); empty without examples.

    Raises:
        UploadError: A layer's output is not finite.
    """
    chosen = torch.randperm(len(data.labels), generator=generator(seed, "calibration"))[:EXAMPLES]
    parts = (part for part in torch.split(chosen.sort().values, BATCH) if len(part))
    return calibrate(model, (normalize(data.images[part], *normalization) for part in parts))


def measure(model: nn.Module, data: ImageData, normalization: Normalization, request: TrainRequest) -> State:
    """Return what the server asks for a merge of weights, measured on the client's training examples.

    Raises:
        UploadError: The request names something else, or the task has no classifier to measure.
    """
    if request.task != CLASSIFIER or isinstance(model, ClientSums) or request.sums not in ("fisher", "gram"):
        raise refusals.bad_request("sums", request.sums, "'fisher' or 'gram', for a client that trains a classifier")
    chosen = torch.randperm(len(data.labels), generator=generator(request.seed, "measure"))
    if request.sums == "fisher":
        chosen = chosen[:MOST]
    parts = ((normalize(data.images[part], *normalization), data.labels[part]) for part in torch.split(chosen, BATCH))
    if request.sums == "gram":
        return gram_matrices(model, parts, lambda net, batch: net(batch[0]))
    return fisher_diagonal(model, parts, lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]))


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read the state_dict of a client with a pretrained model, which is sent as it is.

    Raises:
        UploadError: The file is missing, damaged, not a state_dict, or holds a tensor that numpy cannot represent.
    """
    found = read_checkpoint(path)
    for name, value in found.items():
        try:
            value.detach().numpy()
        except (RuntimeError, TypeError) as error:
            kind = f"{value.dtype}, {value.layout}"
            raise refusals.not_dense(f"checkpoint {path}, tensor {name!r}", kind) from error
    return found
