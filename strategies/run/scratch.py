"""Tensors that wait on the disk, where all of them together may be larger than memory."""

from __future__ import annotations

import errno
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from ..core.durable import store_errors
from ..core.facts import State
from ..core.fingerprint import bytes_of, dense


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
            weakref.finalize(self, _close, self._file)
        for name, value in tensors:
            own = dense(name, value)
            with store_errors(folder):
                self._file.write(bytes_of(own))
            self._places[name] = end, own.dtype, own.shape
            end += own.nbytes

    def __getitem__(self, name: str) -> Tensor:
        begin, dtype, shape = self._places[name]
        value = torch.empty(shape, dtype=dtype)
        with store_errors(self._folder):
            self._file.seek(begin)
            if self._file.readinto(bytes_of(value)) != value.nbytes:
                raise OSError(errno.EIO, "a temporary file is shorter than it was written")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        return dict, (dict(self),)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # of a disk that refused to be written to, and does again
        file.close()
