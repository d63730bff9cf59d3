"""Weights as safetensors and facts as JSON, written atomically and compared with their digests."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from ..core.durable import (
    DIGEST,
    atomic_write,
    store_errors,
    sync_folder,
    verify_digest,
    with_digest,
    write_facts,
)
from ..core.errors import StoreError
from ..core.fingerprint import Weights, bytes_of, dense, weights_sha256


def weights_bytes(state: Weights) -> bytes:
    """Return tensors as a safetensors file without metadata; equal tensors give equal bytes, whatever their order.

    Args:
        state: Name -> tensor or array, of any shape and layout, any dtype that safetensors knows.

    Raises:
        StoreError: A value is no dense tensor, or of a dtype that safetensors does not know.
    """
    return b"".join(_pieces(state))


def _pieces(state: Weights) -> Iterator[bytes | memoryview]:
    """Yield the file that safetensors writes of tensors: its header, then one tensor after the other."""
    empty, shapes = dict[str, torch.Tensor](), dict[str, tuple[tuple[int, ...], int]]()
    for name in state:
        tensor = dense(name, state[name])
        empty[name] = torch.empty(0, dtype=tensor.dtype)
        shapes[name] = tuple(tensor.shape), tensor.nbytes
    try:
        data = safetensors.torch.save(empty)  # which says the order of the tensors and the names of their dtypes
    except (KeyError, RuntimeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in empty.values()}))
        raise StoreError(f"tensors of {dtypes} cannot be stored as safetensors ({error})") from error
    header, end = json.loads(data[8:]), 0
    for name, entry in header.items():
        shape, size = shapes[name]
        entry |= {"shape": shape, "data_offsets": [end, end := end + size]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield struct.pack("<Q", len(text)) + text
    for name in header:
        yield bytes_of(dense(name, state[name]))


def save_weights(path: Path, state: Weights) -> str:
    """Write tensors as safetensors, atomically and one by one, and return the sha256 of the file's bytes in hex.

    Args:
        path: The file; its folder must exist.

    Raises:
        StoreError: The disk refuses, or a tensor cannot be stored.
    """
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for piece in _pieces(state):
            digest.update(piece)
            yield piece

    with store_errors(path):
        atomic_write(path, hashed())
    return digest.hexdigest()


def read_weights(path: Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Read a safetensors file into memory of its own (no mapped file, so that the file may go).

    Args:
        sha256: The expected digest of its bytes, in hex; None to leave that unchecked.

    Raises:
        StoreError: It is absent, damaged, or hashes to something else.
    """
    with store_errors(path):
        data = Path(path).read_bytes()
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise StoreError(f"{path}: damaged, expected sha256 {sha256} and found {found}")
    try:
        return dict(safetensors.torch.load(data))
    except (safetensors.SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise StoreError(f"{path}: not a readable safetensors file ({error})") from error


def read_equal_weights(path: Path, sha256: str | None) -> dict[str, torch.Tensor]:
    """Read a safetensors file whose tensors have a known digest.

    Args:
        sha256: Their :func:`weights_sha256`; None or empty leaves them uncompared.

    Raises:
        StoreError: The file is absent or damaged, or its tensors have another digest.
    """
    state = read_weights(path)
    if sha256 and (found := weights_sha256(state)) != sha256:
        raise StoreError(f"{path}: damaged, its weights must have sha256 {sha256} and have {found}; put back a copy")
    return state


def plain(value: Any) -> Any:
    """Return a value as plain JSON knows it: numbers of numpy and torch as numbers, NaN and infinities as null."""
    if isinstance(value, np.generic) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with its digest, atomically; see :func:`plain` for numbers.

    Raises:
        StoreError: The disk refuses, or a value has no form in JSON.
    """
    write_facts(path, plain(value))


# Files of one JSON object per line that only grow, and survive a writer killed inside a line.
#
# Every line carries its digest. A line that was cut off lacks its end or holds zeros; it was never reported as written,
# and is left out. Any other line that differs from its digest is damaged, which is an error.


@dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line.

    A line counts once its newline is written; a text after the last newline is a torn line and is never read.

    Attributes:
        path: The file; absent means no rows.
        strict: A cut-off line before the last is an error; else it is left out.
    """

    path: Path
    strict: bool = True

    def append(self, row: Mapping[str, Any], *, sync: bool = True) -> None:
        """Add a row, or leave the file unchanged.

        Args:
            sync: Return only when the row is on the disk itself.

        Raises:
            OSError: The disk refuses.
        """
        line = json.dumps(with_digest(plain(row)), allow_nan=False).encode() + b"\n"
        with self.path.open("a+b", buffering=0) as file:
            end = _end_of_lines(file.read, file.seek)
            try:
                if sync and end == 0:
                    # The name first, so that a line whose write is reported as failed never stays.
                    sync_folder(self.path.parent)
                file.truncate(end)
                _write_all(file.write, line)
                if sync:
                    os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(end)
                raise

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows; a torn last line is left out.

        Raises:
            OSError: The file cannot be read.
            StoreError: A line is damaged; or one before the last is cut off, and the file is strict.
        """
        return [row for row, _, _ in self._parsed()]

    def repair(self) -> None:
        """Cut off a damaged tail, which a crash of the machine may leave.

        Raises:
            OSError: The disk refuses.
            StoreError: A line is damaged; or one before the last is cut off, and the file is strict.
        """
        if not self.path.exists():
            return
        parsed = self._parsed()
        end = parsed[-1][2] if parsed else 0
        if end < self.path.stat().st_size:
            with self.path.open("r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the rows that fail a test, atomically.

        Raises:
            OSError: The disk refuses; the file stays unchanged.
        """
        if self.path.exists():
            lines = [line + b"\n" for row, line, _ in self._parsed() if wanted(row)]
            atomic_write(self.path, b"".join(lines))

    def sync(self) -> None:
        """Bring rows appended without ``sync`` to the disk itself.

        Raises:
            OSError: The disk refuses.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _parsed(self) -> list[tuple[dict[str, Any], bytes, int]]:
        """Return (row, its line, offset of the end of the line) of each intact line."""
        if not self.path.exists():
            return []
        *lines, tail = self.path.read_bytes().split(b"\n")
        found, end = [], 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            row = row_of(line)
            if row is not None:
                found.append((row, line, end))
            elif _was_finished(line) or (self.strict and number < len(lines)):
                raise StoreError(f"{self.path}: line {number} is damaged: must be one JSON object with its digest")
        if row_of(tail[:-1]) is not None:  # its newline was changed into another byte
            raise StoreError(f"{self.path}: line {len(lines) + 1} is damaged: must end with a newline")
        return found


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line without its newline; None if it is cut off or damaged."""
    try:
        row = json.loads(line)
        return verify_digest(row) if isinstance(row, dict) else None
    except (ValueError, RecursionError):
        return None


def _was_finished(line: bytes) -> bool:
    """Return whether a line that cannot be read was whole once; the blocks that a power cut leaves out are zeros."""
    cut = line.startswith(b"\0") or b"\0\0" in line
    return not cut and (DIGEST.encode() in line or line.endswith(b'"}'))


def _end_of_lines(read: Callable[[int], bytes], seek: Callable[[int, int], int]) -> int:
    """Return the offset after the last newline of a file."""
    end = seek(0, os.SEEK_END)
    while end > 0:
        seek(end - 1, os.SEEK_SET)
        if read(1) == b"\n":
            break
        end -= 1
    return end


def _write_all(write: Callable[[bytes], int | None], data: bytes) -> None:
    """Write every byte: on a full disk, an unbuffered file takes a part and reports it only at the next call."""
    while data:
        data = data[write(data) or 0 :]


# One writer per run folder: a lock of the operating system, which ends with its process.


LOCK_NAME = "lock"

_locks: set[FolderLock] = set()


def _drop_inherited() -> None:
    # A forked child shares the lock; a child that outlived its parent would lock out every other process.
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)


class FolderLock:
    """The right to write to a folder, from construction to :meth:`release`.

    Args:
        folder: The folder; it must exist.

    Raises:
        StoreError: Another process holds it (the error names its id), or the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"{folder}: run folder is not writable ({error.strerror})") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        except OSError as error:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            if isinstance(error, BlockingIOError):
                remedy = "call close() of what opened it here" if holder == str(os.getpid()) else "wait or end it"
                raise StoreError(f"{folder}: run folder is in use by process {holder}, {remedy}") from error
            raise StoreError(f"{path}: cannot lock the run folder ({error.strerror})") from error
        _locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock."""
        return self in _locks

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.held:
            _locks.remove(self)
            os.close(self._handle)
