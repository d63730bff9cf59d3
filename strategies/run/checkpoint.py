"""The last checkpoint of a server stage: a state that is replaced each time and rows that are written once.

``checkpoint.json`` names the files of the checkpoint. New files get fresh names, then one rename switches
``checkpoint.json``, then the files that it no longer names are removed. A crash between any two writes so leaves one
whole checkpoint, the old or the new.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.durable import atomic_write, make_folder, read_json, store_errors, with_digest
from ..core.errors import StoreError
from ..method import Snapshot
from .files import read_weights, save_weights

# Trees of plain values and tensors as JSON beside a flat set of tensors, exact to the bit both ways.


def flatten(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree into a JSON value and its tensors.

    One JSON object stands for each value that JSON lacks. Its only key is the kind: ``dict``, ``tuple``,
    ``float``, ``tensor`` or ``array``. A dict is a list of pairs, because keys may be numbers and keep their order. A
    NaN or an infinity is its bits, a tensor or an array its name.

    Args:
        tree: Dicts, lists, tuples, tensors, arrays, numbers, strings, booleans and None; keys are scalars or tuples.

    Returns:
        The JSON value, and name -> tensor.

    Raises:
        StoreError: The tree holds another value; the message names its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(tree, "state", tensors), tensors


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild a tree from the two parts of :func:`flatten`.

    Raises:
        KeyError: A tensor is missing.
        ValueError: The value is not a result of :func:`flatten`.
    """
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "dict":
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in content}
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    if kind == "float":
        return _float_of(bytes.fromhex(content))
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    raise ValueError(f"unknown kind {kind!r}")


def _float_of(bits: bytes) -> float:
    if len(bits) != 8:
        raise ValueError(f"a float of {len(bits)} bytes")
    return float(struct.unpack(">d", bits)[0])


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # Finite floats are exact in JSON: Python writes the shortest text that reads back to the same bits.
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        name = str(len(tensors))
        tensors[name] = value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
        return {"tensor" if isinstance(value, torch.Tensor) else "array": name}
    if isinstance(value, Mapping):
        return {
            "dict": [[_key(key, where), _encode(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]
        }
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise StoreError(
        f"checkpoint {where}: a {type(value).__name__} cannot be stored; must be dicts, lists, tuples, "
        "tensors, numbers, strings, booleans and None"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, (str, int, float, bool, tuple, type(None))):
        return _encode(key, f"key of {where}", {})
    raise StoreError(f"checkpoint {where}: a key of type {type(key).__name__} cannot be stored; must be scalars")


_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of one server stage's checkpoint; there is at most one checkpoint in it.

    Attributes:
        path: The folder; it is made when first needed.
    """

    path: Path

    def save(self, snapshot: Snapshot) -> None:
        """Replace the checkpoint.

        Args:
            snapshot: Its ``appended`` holds only the rows [n, ...] since the last one saved or loaded.

        Raises:
            StoreError: The disk refuses (the earlier checkpoint stays), or the state cannot be stored.
        """
        tree, tensors = flatten(snapshot.state)
        last = self._index()
        chunks: list[dict[str, Any]] = last["chunks"] if last else []
        known = {name for chunk in chunks for name in chunk["names"]}
        rows = {name: new for name, new in snapshot.appended.items() if len(new) or name not in known}
        with store_errors(self.path):
            make_folder(self.path)
            if rows:
                chunks = [*chunks, {"names": sorted(rows), **self._write("rows", rows)}]
            index = {"step": snapshot.step, "state": tree, "tensors": self._write("state", tensors), "chunks": chunks}
            atomic_write(self.path / _INDEX, json.dumps(with_digest(index), allow_nan=False).encode())
        self._remove_all_but({_INDEX, index["tensors"]["file"], *(chunk["file"] for chunk in chunks)})

    def load(self) -> Snapshot | None:
        """Return the checkpoint with all rows ever appended, or None if there is none.

        Raises:
            StoreError: A file of it is damaged; the message names the remedy.
        """
        index = self._index()
        if index is None:
            return None
        try:
            state = unflatten(index["state"], self._read(index["tensors"]))
            chunks = [self._read(chunk) for chunk in index["chunks"]]
            names = {name for chunk in chunks for name in chunk}
            appended = {name: torch.cat([c[name] for c in chunks if name in c]) for name in sorted(names)}
            return Snapshot(step=int(index["step"]), state=state, appended=appended)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RuntimeError, StoreError) as error:
            raise self._damaged(error) from error

    def clear(self) -> None:
        """Remove the checkpoint.

        Raises:
            StoreError: The disk refuses.
        """
        with store_errors(self.path):
            # The index first: without it, no other file counts.
            (self.path / _INDEX).unlink(missing_ok=True)
            if self.path.exists():
                shutil.rmtree(self.path)

    def _index(self) -> dict[str, Any] | None:
        if not (self.path / _INDEX).exists():
            return None
        try:
            index = read_json(self.path / _INDEX)
        except StoreError as error:
            raise self._damaged(error) from error
        if not isinstance(index, dict) or not {"step", "state", "tensors", "chunks"} <= index.keys():
            raise self._damaged(f"{_INDEX} lacks its entries")
        return index

    def _write(self, kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        name = f"{kind}-{uuid.uuid4().hex}.safetensors"
        return {"file": name, "sha256": save_weights(self.path / name, tensors)}

    def _read(self, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
        # The last part of the name alone: an index never points outside its folder.
        return read_weights(self.path / Path(entry["file"]).name, entry["sha256"])

    def _remove_all_but(self, wanted: set[str]) -> None:
        for file in self.path.iterdir():
            if file.name not in wanted:
                # A leftover only takes space, and the next checkpoint tries again.
                with suppress(OSError):
                    file.unlink()

    def _damaged(self, reason: object) -> StoreError:
        return StoreError(f"{self.path}: damaged checkpoint ({reason}); remove this folder to start the stage anew")
