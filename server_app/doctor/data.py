"""A node's config, data, models and checkpoints: whether they exist, are readable, and fit each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_app.config import AppConfig
from fl_app.data import Split, data_root, open_data
from fl_app.division import own_positions
from fl_app.ledger import Ledger
from fl_app.models.features import FeatureFunction, as_read
from fl_app.models.uploaded import model_builders
from fl_app.node_config import checked_facts, checkpoint_path, client_name, node_policy
from fl_app.node_policy import NodePolicy
from server_app.doctor import DoctorFinding
from server_app.settings.read import Settings
from strategies.core.checkpoints import read_checkpoint
from strategies.core.durable import MIB
from strategies.core.errors import DataError, OneShotError, OptionError, StoreError, UploadError
from strategies.core.facts import CLIENT_NAME, backbone_in
from strategies.core.places import expand_user, state_root
from strategies.core.toml import read_toml, read_toml_file
from strategies.uploads.checks import Signature, Signatures, check_upload
from strategies.uploads.tensors import tensor_form

# Flower's own expression for one pair.
_PAIR = re.compile(r"(\S+?)=(\'[^\']*\'|\"[^\"]*\"|\S+)")


@dataclass(frozen=True)
class NodeConfig:
    """A node's config."""

    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: str) -> NodeConfig:
        """Read a TOML file, or pairs as ``flower-supernode --node-config`` takes them.

        Raises:
            OptionError: The file cannot be read, the text is not TOML, a key is unknown, or a value is out of range.
        """
        return cls(checked_facts(_values(given), "node config"))

    @property
    def client(self) -> str:
        """The node's name; by default it follows from the partition number."""
        return client_name(self.facts)

    @property
    def policy(self) -> NodePolicy:
        """The limits that the node sets for the settings of a run."""
        return node_policy(self.facts, self.facts)

    @property
    def partition_id(self) -> int:
        """The number of its part of the training set."""
        return int(self.facts.get("partition-id", 0))

    @property
    def num_partitions(self) -> int:
        """The number of parts of the training set."""
        return int(self.facts.get("num-partitions", 1))

    @property
    def has_data(self) -> bool:
        """Whether it holds examples; a node with a checkpoint needs none."""
        return "partition-id" in self.facts or "data-root" in self.facts

    def data_root(self, of_run: str) -> str:
        """Return the folder of its data: its own, else that of the run's settings if it may read it, else empty."""
        return self.policy.data_root(str(self.facts.get("data-root", "")), of_run)

    def refusals(self, app: AppConfig, architecture: str) -> Iterator[DoctorFinding]:
        """Return what the node's own limits refuse of the planned run; a budget alone refuses nothing here."""
        policy, template = self.policy, "" if self.facts.get("checkpoint") else app.client.checkpoint
        checks = {
            "data source": partial(policy.check_source, app.data.name),
            f"architecture {architecture}": partial(policy.check_architecture, architecture),
        }
        for key, function in (("model.train", app.model.train), ("model.evaluate", app.model.evaluate)):
            if function:
                checks[key] = partial(policy.check_code, key, function)
        if template:
            checks["checkpoint"] = partial(policy.check_readable, "client.checkpoint", self.filled(template))
        for name, check in checks.items():
            try:
                check()
            except UploadError as error:
                fix = "correct the node's config, or the setting"
                yield DoctorFinding("error", f"{name}: limits", str(error), fix=fix)

    def filled(self, template: str) -> Path:
        """Return the path of a checkpoint with the node's name and the number of its part.

        Raises:
            UploadError: The template has another placeholder.
        """
        return expand_user(checkpoint_path(template, client=self.client, partition_id=self.partition_id) or "")

    def look(self) -> Iterator[DoctorFinding]:
        """Check the node's name, and show its config."""
        if not CLIENT_NAME.fullmatch(self.client):
            wanted = f"a name that matches {CLIENT_NAME.pattern}"
            yield DoctorFinding("error", "node config client", repr(self.client[:80]), wanted, "rename it")
        elif "client" not in self.facts:
            fix = 'for example client="hospital-a"; the server treats two nodes with one name as one client'
            found = f"no client: its name will be {self.client}"
            yield DoctorFinding("warning", "node config", found, "its own name", fix)
        else:
            yield DoctorFinding("ok", "node config", ", ".join(f"{key}={value}" for key, value in self.facts.items()))

    def budget(self) -> Iterator[DoctorFinding]:
        """Return how much of the node's privacy budget is spent; nothing without a budget."""
        if (most := self.policy.max_epsilon) is None:
            return
        ledger = Ledger.of(state_root(self.policy.state), self.client)
        try:
            epsilon, delta = ledger.spent()
        except StoreError as error:
            fix = "put back a copy of this file; until then the node sends no private upload"
            yield DoctorFinding("error", "privacy budget", str(error), "a ledger as it was written", fix)
            return
        found = f"epsilon {epsilon:g} of {most:g} and delta {delta:g} of {self.policy.max_delta:g} are spent"
        yield DoctorFinding("ok" if epsilon < most else "warning", "privacy budget", f"{found} ({ledger.path})")


def _values(given: str) -> dict[str, Any]:
    if given.endswith(".toml"):
        return read_toml_file(expand_user(given), "node config")
    try:
        return read_toml("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(given)))
    except ValueError as error:
        raise OptionError(
            f"node config {given[:200]!r} cannot be read: {error}; must be key=value pairs with texts in quotes, for "
            'example client="hospital-a" partition-id=0'
        ) from error


_TRIED = 8


def server_data(settings: Settings) -> Iterator[DoctorFinding]:
    """Open the test half of the data set, on which the server evaluates, and read some of it."""
    yield _readable(settings, "test", f"data {settings.app.data.name}, test half")
    if settings.app.data.proxy:
        yield _readable(settings, "train", f"data {settings.app.data.name}, the server's share")


def node_data(settings: Settings, node: NodeConfig) -> Iterator[DoctorFinding]:
    """Open the training half of the node's data set, count the node's own part and read some of it."""
    name = f"data {settings.app.data.name}, training half"
    if node.facts.get("checkpoint") and not node.has_data:
        yield DoctorFinding("skipped", name, "this node uploads a checkpoint and has no data")
    else:
        yield _readable(settings, "train", name, node)


def architectures(names: tuple[str, ...], split: Split | None, settings: Settings) -> Iterator[DoctorFinding]:
    """Check that these architectures are known, and that they take the data set's examples."""
    if split is None:
        yield DoctorFinding(
            "skipped", "architectures", "unknown shape of the examples, because the data cannot be read"
        )
        return
    for name in dict.fromkeys(names):
        check = f"architecture {name}"
        shape = f"{split.num_classes} classes, examples of {split.input_shape}"
        try:
            known = _known(split, name, settings)
        except OptionError as error:
            yield DoctorFinding("error", check, str(error), shape, "correct the code, or the setting that names it")
            continue
        if name in known:
            yield DoctorFinding("ok", check, f"known to the server; takes {shape}")
        else:
            fix = f"set model.name (or the node's architecture) to one of {', '.join(known)}"
            yield DoctorFinding("error", check, "not in the zoo, or it does not take such examples", shape, fix)


def checkpoint(path: Path, architecture: str, split: Split | None, settings: Settings) -> DoctorFinding:
    """Read a node's checkpoint, and compare it with its declared architecture.

    Args:
        split: A half of the data set; None if it cannot be opened here, then the check only reads the file.
    """
    name = f"checkpoint {path.name}"
    try:
        state = read_checkpoint(path)
    except UploadError as error:
        fix = "put the file there, or name it in the node's config (checkpoint)"
        return DoctorFinding("error", name, str(error), fix=fix)
    shown = f"{path}: {len(state)} tensors, {sum(value.nbytes for value in state.values()) / MIB:.1f} MiB"
    signatures = {} if split is None else _signatures(split, (architecture,), settings)
    if architecture not in signatures:  # the checks of the data and of the architecture have the reason
        return DoctorFinding("skipped", name, f"{shown}; not compared with {architecture}")
    try:
        check_upload(state, architecture, signatures[architecture], tensor_form("its tensors", exact=True))
    except UploadError as error:
        fix = f"name its true architecture (architecture), or a checkpoint of {architecture} for this data set"
        return DoctorFinding("error", name, f"{path}: {error}", "a model that the server accepts", fix)
    return DoctorFinding("ok", name, f"{shown}, fit {architecture}")


def model_bytes(split: Split, names: tuple[str, ...], settings: Settings) -> dict[str, int]:
    """Return the upload size in bytes of each architecture that takes the data set's examples."""
    return {
        name: sum(prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in signature.values())
        for name, signature in _signatures(split, names, settings).items()
    }


def _signatures(split: Split, names: tuple[str, ...], settings: Settings) -> dict[str, Signature]:
    found: dict[str, Callable[[], nn.Module]] = {}
    for name in names:
        with suppress(OptionError):  # the check of the architectures has the line
            found |= _known(split, name, settings)
    signatures = Signatures(found)
    return {name: signatures[name] for name in names if name in signatures}


def _known(split: Split, name: str, settings: Settings) -> dict[str, Callable[[], nn.Module]]:
    """Return the builders of the zoo and of a named architecture; one on a backbone is built."""
    function = FeatureFunction(settings.app.features, settings.app.seed, *split.normalization)
    found = model_builders(split.num_classes, split.input_shape, [name], function, logits=not settings.app.model.train)
    if backbone_in(name) and name in found:
        found[name]()
    return found


def _readable(settings: Settings, half: str, name: str, node: NodeConfig | None = None) -> DoctorFinding:
    root, key = settings.app.data.root, "data.root by --run-config"
    if node is not None:
        root, key = node.data_root(root), "data-root in the node's config"
    try:
        split = _opened(settings, half, root)
        count = f"{len(split.labels)} examples of {split.num_classes} classes"
        positions = list(range(len(split.labels)))
        if node is not None:
            part, parts = node.partition_id, node.num_partitions
            positions = own_positions(split, settings.app, partition_id=part, num_partitions=parts).tolist()
            count = f"{len(positions)} of {count} are this node's"
        split.take(positions[:_TRIED])
    except (DataError, OptionError) as error:
        fix = f"put the data set there, or name its folder: {key}, or ONESHOT_DATA"
        return DoctorFinding("error", name, str(error), f"the data set, under {data_root(root)}", fix)
    place = "embedded in scikit-learn" if settings.app.data.name == "digits" else f"under {data_root(root)}"
    return DoctorFinding("ok", name, f"{count}, {place}")


def split_of(settings: Settings, halves: tuple[str, ...], root: str | None = None) -> Split | None:
    """Return the first half of the data set that opens here, for its shape and classes; None if neither does."""
    for half in halves:
        with suppress(OneShotError, OSError):
            return _opened(settings, half, root)
    return None


def _opened(settings: Settings, half: str, root: str | None) -> Split:
    app = settings.app
    return as_read(open_data(app.data, half, root=root, download=False, targets=bool(app.model.train)), app.features)
