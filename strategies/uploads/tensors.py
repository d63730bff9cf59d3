"""Tensors as a form of an upload's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..core import refusals
from .checks import ArrayForm, Shape


def tensor_form(what: str, *, exact: bool) -> ArrayForm:
    """Return how tensors are compared with an architecture, and read.

    Args:
        what: The tensors' name in messages, a plural.
        exact: Whether their dtypes must equal the architecture's; else only the kind of number, and they are converted.
            Floats that are whole numbers become such, as after a cast of a whole ``state_dict``.
    """

    def misfit(value: torch.Tensor, shape: Shape, dtype: str) -> str:
        wanted = _dtype(dtype)
        alike = value.dtype == wanted if exact else _number(value.dtype) == _number(wanted) or _is_whole(value, wanted)
        return "" if _is_plain(value) and tuple(value.shape) == shape and alike else _describe(value)

    return ArrayForm(what, "tensor {!r}", _read, misfit)


def _read(value: torch.Tensor, _: Shape, dtype: str, what: str) -> np.ndarray[Any, Any]:
    try:
        return value.detach().to(_dtype(dtype)).numpy()
    except TypeError as error:  # numpy has no bfloat16
        raise refusals.no_float32(what, dtype) from error


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and not (value.is_nested or value.is_quantized or value.is_meta)


def _number(dtype: torch.dtype) -> str:
    """Return the kind of number: within one kind a value is converted, between two it would change its meaning."""
    if dtype.is_floating_point:
        return "float"
    return str(dtype) if dtype.is_complex or str(dtype) == "torch.bool" else "whole"


def _is_whole(value: torch.Tensor, wanted: torch.dtype) -> bool:
    kinds = _is_plain(value) and _number(value.dtype) == "float" and _number(wanted) == "whole"
    # An infinity may become the largest whole number, and return from it.
    return kinds and bool(value.isfinite().all()) and torch.equal(value.to(wanted).to(value.dtype), value)


def _describe(value: torch.Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}" if _is_plain(value) else f"{dtype} and no dense tensor"
