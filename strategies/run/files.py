"""Weights as safetensors and facts as JSON, written atomically and compared with their digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from ..core.durable import atomic_write, read_facts, store_errors, write_facts
from ..core.errors import StoreError
from ..uploads.digest import Weights, dense, weights_sha256


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written.

    Attributes:
        sha256: Digest of its bytes, in hex.
        bytes: Its size.
    """

    sha256: str
    bytes: int


def weights_bytes(state: Weights) -> bytes:
    """Return tensors as a safetensors file without metadata; equal tensors give equal bytes, whatever their order.

    Args:
        state: Name -> tensor or array, of any shape and layout, any dtype that safetensors knows.

    Raises:
        StoreError: A value is no dense tensor, or of a dtype that safetensors does not know.
    """
    # Clones, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: dense(name, state[name]).clone() for name in sorted(state)}
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
        raise StoreError(f"{path}: no readable safetensors file ({error})") from error


def read_equal_weights(path: Path, sha256: str | None) -> dict[str, torch.Tensor]:
    """Read a safetensors file whose tensors have a known digest.

    Args:
        path: The file.
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


def read_json(path: Path) -> Any:
    """Read a JSON file, and compare it with its digest; files that were written before there were digests have none.

    Raises:
        StoreError: It is absent, damaged, or differs from its digest.
    """
    return read_facts(path)
