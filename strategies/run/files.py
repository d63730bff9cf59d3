"""Files that are either whole or absent: atomic writes, weights as safetensors, facts as JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from ..core.errors import StoreError

Weights = Mapping[str, torch.Tensor | np.ndarray]

# A process that is killed while it writes leaves a file of this pattern behind; nothing ever reads one.
TEMPORARY_PATTERN = ".*.tmp"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written.

    Attributes:
        sha256: Digest of its bytes, in hex.
        bytes: Its size.
    """

    sha256: str
    bytes: int


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old content or the new one, never a part.

    Args:
        path: The file; its folder must exist.
        data: Its whole content.

    Raises:
        OSError: The disk is full or refuses; the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files behind them.

    Raises:
        OSError: The disk refuses. File systems that cannot sync a folder at all are let pass.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it; nothing happens if it exists.

    Args:
        folder: The folder.
        mode: Its permissions, less the umask; of those above it only the umask decides.

    Raises:
        OSError: It cannot be made.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=mode, exist_ok=True)
        sync_folder(folder.parent)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left in a folder and below; only its single writer may call this."""
    for leftover in folder.rglob(TEMPORARY_PATTERN):
        with suppress(OSError):
            leftover.unlink()


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hex, reading it piece by piece.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _dense(name: str, value: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Return a contiguous tensor on the CPU, not necessarily a copy."""
    try:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu").contiguous()
        # torch knows neither foreign byte orders nor negative strides; a copy has neither.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise StoreError(f"tensor {name!r}: a dense tensor or array is needed, found {type(value)}") from error


def weights_bytes(state: Weights) -> bytes:
    """Return tensors as a safetensors file without metadata; equal tensors give equal bytes, whatever their order.

    Args:
        state: Name -> tensor or array, of any shape and layout, any dtype that safetensors knows.

    Raises:
        StoreError: A value is no dense tensor, or of a dtype that safetensors does not know.
    """
    # Clones, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: _dense(name, state[name]).clone() for name in sorted(state)}
    try:
        return safetensors.torch.save(tensors)
    except (KeyError, RuntimeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        raise StoreError(f"tensors of {dtypes} cannot be stored as safetensors ({error})") from error


def save_weights(path: Path, state: Weights) -> WrittenFile:
    """Write tensors as safetensors, atomically.

    Args:
        path: The file; its folder must exist.
        state: Name -> tensor or array, see :func:`weights_bytes`.

    Raises:
        StoreError: The disk refuses, or a tensor cannot be stored.
    """
    data = weights_bytes(state)
    with store_errors(path):
        atomic_write(path, data)
    return WrittenFile(hashlib.sha256(data).hexdigest(), len(data))


def read_weights(path: Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Read a safetensors file into memory of its own (no mapped file, so that the file may go).

    Args:
        path: The file.
        sha256: What its bytes must hash to, in hex; None to leave that unchecked.

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
        raise StoreError(f"{path}: no readable safetensors file ({error})") from error


def weights_sha256(state: Weights) -> str:
    """Return a digest of weights themselves: sorted names, dtypes, shapes, bytes; no file format is part of it.

    Args:
        state: Name -> tensor or array.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = _dense(name, state[name])
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    """Write a value as indented JSON, atomically; see :func:`plain` for what numbers become.

    Raises:
        StoreError: The disk refuses, or the value holds what JSON cannot say.
    """
    try:
        text = json.dumps(plain(value), indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: {error}") from error
    with store_errors(path):
        atomic_write(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        StoreError: It is absent or damaged.
    """
    with store_errors(path):
        data = Path(path).read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: damaged, no JSON ({error})") from error
