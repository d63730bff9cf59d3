"""Trees of tensors as trees of numpy arrays, for the way between the driver and an actor.

Ray moves numpy arrays ten times faster than torch tensors, and reads them without a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as an array of the same shape and bits.

    Attributes:
        dtype: The name of the torch dtype; numpy does not know all of them (bfloat16 travels as int16).
        array: Its values, or its bits as integers of the same width.
    """

    dtype: str
    array: npt.NDArray[Any]


def pack(value: Any, *, copy: bool = True) -> Any:
    """Copy a tree, every tensor replaced by a :class:`PackedTensor`.

    Args:
        value: Dicts, lists, tuples and dataclasses of tensors on any device, arrays, and other values, which pass
            unchanged.
        copy: Copy the memory too, so that the caller may keep changing its tensors. False for a value that goes to Ray
            at once, which copies it itself.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, copy)
    return _walk(value, partial(pack, copy=copy))


def unpack(value: Any) -> Any:
    """Return the tree given to :func:`pack`, bit for bit; its tensors are on the CPU, contiguous and writable."""
    if isinstance(value, PackedTensor):
        return _unpack_tensor(value)
    return _walk(value, unpack)


def _walk(value: Any, visit: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: visit(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [visit(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.ndarray):
        return value.copy()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: visit(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _pack_tensor(tensor: Any, copy: bool) -> PackedTensor:
    import torch

    plain = tensor.detach().to("cpu", copy=copy, memory_format=torch.contiguous_format).contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return PackedTensor(name, plain.numpy())
    except TypeError:  # numpy has no such dtype
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return PackedTensor(name, plain.view(bits).numpy())


def _unpack_tensor(packed: PackedTensor) -> Any:
    import torch

    # Arrays out of Ray's object store are read-only views: copy.
    tensor = torch.from_numpy(packed.array.copy())
    dtype = getattr(torch, packed.dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
