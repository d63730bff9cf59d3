"""A digest of weights themselves, whatever the file that holds them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import torch

from ..core.errors import StoreError

Weights = Mapping[str, torch.Tensor | np.ndarray]


def dense(name: str, value: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Return a contiguous tensor on the CPU, not necessarily a copy.

    Args:
        name: The tensor's name in messages.
        value: A dense tensor or array.

    Raises:
        StoreError: It is neither.
    """
    try:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu").contiguous()
        # torch knows neither foreign byte orders nor negative strides; a copy has neither.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise StoreError(f"tensor {name!r}: a dense tensor or array is needed, found {type(value)}") from error


def weights_sha256(state: Weights) -> str:
    """Return a digest of weights themselves: sorted names, dtypes, shapes, bytes; no file format is part of it.

    Args:
        state: Name -> tensor or array.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = dense(name, state[name])
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
