"""The last checkpoint of a server stage: a state that is replaced each time and rows that are written once.

``checkpoint.json`` names the files of the checkpoint. New files get fresh names, then one rename switches
``checkpoint.json``, then the files that it no longer names are removed. A crash between any two writes so leaves one
whole checkpoint, the old or the new.
"""

from __future__ import annotations

import json
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.durable import atomic_write, make_folder, sealed, store_errors
from ..core.errors import StoreError
from ..method import Snapshot
from .files import WrittenFile, read_json, read_weights, save_weights
from .tree import flatten, unflatten

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
            atomic_write(self.path / _INDEX, json.dumps(sealed(index), allow_nan=False).encode())
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
        written: WrittenFile = save_weights(self.path / name, tensors)
        return {"file": name, "sha256": written.sha256}

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
