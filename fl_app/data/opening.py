"""Opens the configured data set: one by name, the user's own function, or tables as files.

A function of the user's own code, named ``package.module:attribute``, gets those of ``split`` ("train" or "test") and
``root`` (the setting ``data.root``) that its signature names. It returns ``(examples, labels)``, ``(examples, labels,
holders)`` or ``(examples, labels, holders, classes)``, as numpy arrays or torch tensors:

The test half may have no examples, [0, ...], on a server without any.

- examples: uint8 [N, ch, H, W] or [N, H, W], pixels of square images; float32 [N, ch, H, W] or [N, F], a model's
  input already; or int64 [N, L], texts of L tokens.
- labels: whole numbers [N], in 0 .. C - 1.
- holders: whole numbers [N], in 0 .. K - 1: the client that holds each training example, of K clients; or None.
- classes: a list of the names of the classes [C], in the order of their numbers, which all parties must share.

For a user's own training the second value is its targets, numbers [N, ...] of any kind, and there are no classes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fl_app.project import called, function_of
from strategies.core.errors import DataError, OptionError
from strategies.core.options import listed

from .config import DataConfig
from .files import disk_errors
from .folders import classes_in
from .sources import bare_split, data_root, open_folders, open_split
from .split import Split, bare_rows, pixels, unchanged
from .table_files import Schema, holds_test_rows, open_tables, schema_of


class OwnHalf(NamedTuple):
    """One half of a user's data set.

    Attributes:
        examples: uint8 [N, ch, H, W], float32 [N, ch, H, W] or [N, F, 1, 1], or int64 [N, 1, 1, L].
        labels: int64 [N].
        holders: The client of each example, int64 [N]; None if the function does not say.
        classes: The names of the classes; empty if the function does not say.
        targets: Of a user's own training [N, ...]; None where the labels are classes.
    """

    examples: torch.Tensor
    labels: torch.Tensor
    holders: torch.Tensor | None
    classes: tuple[str, ...] = ()
    targets: torch.Tensor | None = None


@functools.lru_cache(maxsize=2)
def open_own(name: str, split: str, root: str, *, targets: bool = False) -> OwnHalf:
    """Call the user's function, once per half in a process; refuse one that fails, or returns something else."""
    what = f"data source {name!r}"
    function = function_of(name, "setting 'data.name'")
    try:
        found = called(function, {"split": split, "root": root}, what)
    except OptionError as error:
        raise DataError(str(error)) from error  # may hold values of examples, which a node keeps in its own log
    what = f"{what}, {split} half,"
    if not isinstance(found, tuple | list) or len(found) not in (2, 3, 4):
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise DataError(
            f"{what} returns {type(found).__name__}{size}: must return examples and labels, and perhaps holders and "
            "class names"
        )
    examples, learned = _examples(found[0], what, least=split == "train"), None
    if targets:
        learned = _targets(found[1], what, len(examples))
        labels = torch.zeros(len(learned), dtype=torch.int64)  # of one kind, for the division
    else:
        labels = _whole(found[1], f"{what} returns labels")
    holders = _whole(found[2], f"{what} returns holders") if len(found) > 2 and found[2] is not None else None
    classes = tuple(map(str, found[3])) if len(found) == 4 and found[3] is not None and not targets else ()
    if len(set(classes)) < len(classes) or (classes and _largest(labels) >= len(classes)):
        raise DataError(
            f"{what} returns {len(classes)} class names, {str(classes)[:80]}, and labels up to {_largest(labels)}: "
            "must be different names, one per class"
        )
    for which, numbers in (("labels", labels), ("holders", holders)):
        if numbers is not None and len(numbers) != len(examples):
            raise DataError(f"{what} returns {len(examples)} examples and {len(numbers)} {which}: must be as many")
    # Not all numbers up to the largest, which may be that of a patient.
    named = sorted(set(holders.tolist())) if holders is not None else []
    if gaps := [number for number, holder in enumerate(named) if number != holder]:
        raise DataError(f"{what} returns holders without {gaps[0]}: must be 0 to K - 1, each with an example")
    return OwnHalf(examples, labels, holders, classes, learned)


def num_classes_of(half: OwnHalf, stated: int, what: str) -> int:
    """Return C: the number of the named classes, the stated number, else one more than this half's largest label.

    Raises:
        DataError: A label is not below the stated number, other classes are named, or a half without examples says no
            number.
    """
    if half.classes:
        if stated not in (0, len(half.classes)):
            raise DataError(
                f"{what} names {len(half.classes)} classes: must be as many as 'data.num-classes', {stated}"
            )
        return len(half.classes)
    if not len(half.labels) and not stated:
        raise DataError(f"{what} has no examples: must name the classes, or 'data.num-classes' their number")
    largest = _largest(half.labels)
    if stated and largest >= stated:
        raise DataError(f"{what} has label {largest}: must be 0 to {stated - 1} with 'data.num-classes' {stated}")
    return stated or largest + 1


def _largest(labels: torch.Tensor) -> int:
    return int(labels.max()) if len(labels) else -1


def _examples(found: Any, what: str, *, least: int) -> torch.Tensor:
    tensor = _tensor(found, f"{what} returns examples")
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    forms = {(torch.uint8, 3), (torch.uint8, 4), (torch.float32, 4), (torch.float32, 2), (torch.int64, 2)}
    if (tensor.dtype, tensor.dim()) not in forms or len(tensor) < least or 0 in tensor.shape[1:]:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise DataError(
            f"{what} returns examples of {kind}: must be uint8 or float32 [N, channels, height, width], uint8 "
            "[N, height, width], float32 [N, features], or int64 [N, tokens]"
        )
    if tensor.dim() == 4 and tensor.shape[3] <= 4 < tensor.shape[1] == tensor.shape[2]:
        raise DataError(
            f"{what} returns examples of shape {list(tensor.shape)}, with the channels last: must be [N, channels, "
            "height, width], as of np.moveaxis(images, 3, 1)"
        )
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{what} returns examples with NaN or Inf: must be finite numbers")
    if tensor.dim() == 2:
        return tensor[:, :, None, None] if tensor.is_floating_point() else tensor[:, None, None, :]
    return tensor[:, None] if tensor.dim() == 3 else tensor


def _targets(found: Any, what: str, count: int) -> torch.Tensor:
    tensor = _tensor(found, f"{what} returns targets")
    if tensor.dim() < 1 or len(tensor) != count:
        raise DataError(f"{what} returns {count} examples and targets {list(tensor.shape)}: must be [{count}, ...]")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{what} returns targets with NaN or Inf: must be finite numbers")
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _whole(found: Any, what: str) -> torch.Tensor:
    tensor = _tensor(found, what)
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise DataError(f"{what} of {kind}: must be whole numbers [N]")
    whole = tensor.long()  # first, because torch has no minimum of wider unsigned numbers than bytes
    if len(whole) and (least := int(whole.min())) < 0:
        signed = tensor.dtype.is_signed
        raise DataError(
            f"{what} with {least}: must be 0 or more" if signed else f"{what} of 2**63 or more: must be less"
        )
    return whole


def _tensor(found: Any, what: str) -> torch.Tensor:
    if isinstance(found, torch.Tensor):
        return found.detach().cpu()
    try:
        array = np.array(found)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} that are not an array ({type(found).__name__}): must be numpy or torch") from error


@disk_errors()
def open_data(
    data: DataConfig, half: str, *, root: str | None = None, download: bool = True, targets: bool = False
) -> Split:
    """Open the training or the test half of the configured data set.

    Args:
        targets: Whether the user's own training learns the examples, so that the targets may be numbers of any kind.

    Raises:
        OptionError: A setting does not fit the data set.
        DataError: The data set is missing, damaged or closed to this user; the error names the remedy, or the file.
    """
    place = data.root if root is None else root
    if data.own:
        return _own(data, half, place, targets=targets)
    if data.tables:
        folder = data_root(place)
        schema = schema_of(folder, label=data.label, sha256=data.schema_sha256, numbers=targets)
        found = open_tables(
            folder, half, form=data.name, label=data.label, client=data.client, group=data.group, schema=schema
        )
        return replace(
            _bare_table(schema, data.label), labels=found.labels, read=found.rows.__getitem__, domains=found.holders,
            by_client=found.by_client, groups=found.groups, targets=found.targets,
        )  # fmt: skip
    if data.name == "imagefolder":
        return open_folders(data_root(place), half, data.image_size, listed(data.classes), data.group)
    return open_split(
        data.name,
        half,
        root=place,
        image_size=data.image_size,
        left_out=data.left_out,
        normalization=data.normalization,
        download=download,
    )


def _bare_table(schema: Schema, label: str) -> Split:
    columns = [column.words for column in schema.columns]
    if not schema.classes:
        columns.append(f"{label}: the target, a number")
    bare = bare_rows(schema.features, len(schema.classes) or 1)  # of numbers a model of the zoo has one output
    return replace(bare, classes=schema.classes, columns=tuple(columns), named=bool(schema.classes))


def open_facts(data: DataConfig, *, absent: bool = False, targets: bool = False) -> Split | None:
    """Return the test half of a server without held-out examples: no example, and the facts that all parties share.

    Args:
        absent: Whether the server has none whatever lies in its folder; else it has none where the files of tables or
            folders of images have no test half.
        targets: See :func:`open_data`.

    Returns:
        None if the server has a test half, or if only its examples tell these facts: those of your own code.

    Raises:
        OptionError: The schema of tables is missing or wrong, or nothing names the classes of folders of images.
    """
    folder = data_root(data.root)
    if data.own:
        return None
    if data.tables:
        if not absent and holds_test_rows(folder, data.name):
            return None
        schema = schema_of(folder, label=data.label, sha256=data.schema_sha256, numbers=targets)
        return _bare_table(schema, data.label)
    names = listed(data.classes)
    if data.name == "imagefolder" and not absent and ((folder / "test").exists() or not names or not data.image_size):
        return None
    if data.name == "imagefolder" and not names:
        if not (folder / "train").is_dir():  # of a simulation's clients
            raise OptionError("setting 'data.classes' is '': must name the classes on a server without examples")
        names = sorted(classes_in(folder / "train"))
    if data.name == "imagefolder" or absent:
        return bare_split(data.name, data.image_size, data.normalization, names)
    return None


def holds_test_half(data: DataConfig, root: str) -> bool:
    """Return whether a node's own folder has a test half: ``test/`` of images, or the table of the test rows."""
    folder = data_root(root)
    return (
        holds_test_rows(folder, data.name) if data.tables else data.name == "imagefolder" and (folder / "test").is_dir()
    )


def _own(data: DataConfig, half: str, root: str, *, targets: bool) -> Split:
    found = open_own(data.name, half, root, targets=targets)
    what = f"data source {data.name!r}, {half} half,"
    if found.targets is None:
        classes = num_classes_of(found, data.num_classes, what)
    else:  # the outputs of a model of the zoo: a number each of a row [N, C]
        classes = found.targets.shape[1] if found.targets.dim() == 2 else 1
    channels, height, width = found.examples.shape[1:]
    read = found.examples.__getitem__
    if found.examples.dtype != torch.uint8:
        if data.image_size:
            raise DataError(f"setting 'data.image-size' is {data.image_size}: must be 0 for {what} which has no pixels")
        opened = unchanged(found.labels, read, num_classes=classes, shape=(channels, height, width))
    else:
        if found.targets is not None and data.image_size:
            raise DataError(f"setting 'data.image-size' is {data.image_size}: must be 0 with 'model.train'")
        if height != width and not data.image_size:
            raise DataError(
                f"{what} returns images of {height} x {width} pixels: must be squares, or set 'data.image-size'"
            )
        opened = pixels(found.labels, read, num_classes=classes, shape=(channels, data.image_size or height))
    return replace(
        opened,
        domains=found.holders,
        by_client=found.holders is not None,
        classes=found.classes,
        named=bool(found.classes),
        targets=found.targets,
    )
