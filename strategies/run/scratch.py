"""Tensors that wait on the disk, where all of them together may be larger than memory."""

from __future__ import annotations

import errno
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..core.durable import store_errors
from ..core.facts import State


def to_scratch(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> State:
    """Write tensors as they come, and return what reads each; see :class:`ScratchTensors`."""
    return cast("State", ScratchTensors(folder, tensors))


class ScratchTensors(Mapping[str, Tensor]):
    """Tensors in a file without a name, which ends with this object; each is read when it is asked for.

    Args:
        folder: The folder whose disk holds the file.
        tensors: Name and dense tensor, written as they come.

    Raises:
        StoreError: The disk refuses.
    """

    def __init__(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self._folder, end = folder, 0
        with store_errors(folder):
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".scratch.", suffix=".tmp")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        for name, value in tensors:
            own = value.detach().cpu().contiguous()
            with store_errors(folder):
                self._file.write(_bytes_of(own))
            self._places[name] = end, own.dtype, own.shape
            end += own.nbytes

    def __getitem__(self, name: str) -> Tensor:
        begin, dtype, shape = self._places[name]
        value = torch.empty(shape, dtype=dtype)
        with store_errors(self._folder):
            self._file.seek(begin)
            if self._file.readinto(_bytes_of(value)) != value.nbytes:
                raise OSError(errno.EIO, "a temporary file is shorter than it was written")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _bytes_of(value: Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data
