"""Data, models and checkpoints: whether they exist, are readable, and fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import nn

from fl_app.data import Split, data_root, open_data
from fl_app.division import own_positions
from fl_app.models.features import FeatureFunction, as_read
from fl_app.models.uploaded import model_builders
from server_app.doctor import DoctorFinding
from server_app.doctor.node import NodeConfig
from server_app.settings.read import Settings
from strategies.core.checkpoints import read_checkpoint
from strategies.core.durable import MIB
from strategies.core.errors import DataError, OneShotError, OptionError, UploadError
from strategies.core.facts import backbone_in
from strategies.uploads.checks import Signature, Signatures, check_upload
from strategies.uploads.tensors import tensor_form

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
    found = model_builders(split.num_classes, split.input_shape, [name], function)
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
    return as_read(open_data(settings.app.data, half, root=root, download=False), settings.app.features)
