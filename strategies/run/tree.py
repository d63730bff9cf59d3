"""Trees of plain values and tensors as JSON beside a flat set of tensors, exact to the bit both ways."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..core.errors import StoreError


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
