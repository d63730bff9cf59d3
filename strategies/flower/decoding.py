"""Arrays from outside: numpy's file format, read without trust and without pickle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flwr.app import Array

from ..core import refusals
from ..uploads.checks import Form

# Version 1.0; later ones are for headers beyond 64 KiB.
NPY_MAGIC = b"\x93NUMPY\x01\x00"


def decode_array(array: Array, shape: tuple[int, ...], dtype: str, where: str) -> np.ndarray[Any, Any]:
    """Decode one array, trusting nothing: its own header is compared with the one expected, and never evaluated.

    Raises:
        UploadError: Shape, dtype or length differ from the expected ones, or the array is not numpy's.
    """
    if tuple(array.shape) != shape or array.dtype != dtype:
        found = f"{array.dtype[:80]}{list(array.shape[:9])}"
        raise refusals.other_form(where, found, f"{dtype}{list(shape)}")
    if array.stype != "numpy.ndarray" or not array.data.startswith(NPY_MAGIC):
        raise refusals.no_numpy_array(where, array.stype, array.data[:8], NPY_MAGIC)
    start = 10 + int.from_bytes(array.data[8:10], "little")
    header, size = array.data[10:start].rstrip(), math.prod(shape) * np.dtype(dtype).itemsize
    headers = [_npy_header(shape, dtype, fortran=fortran) for fortran in (False, True)]
    if header not in headers:
        shown = header[:120].decode("ascii", "replace")
        raise refusals.other_header(where, shown, headers[0].decode())
    if len(array.data) - start != size:
        raise refusals.other_length(where, len(array.data) - start, size)
    values = np.frombuffer(array.data, np.dtype(dtype), math.prod(shape), start)
    return values.reshape(shape, order="F" if header == headers[1] else "C").copy(order="C")


def array_form(record: str) -> Form:
    """Return the form in which the arrays of a record come, for the checks of an upload."""
    return Form(record, f"{record}[{{!r}}]", decode_array)


def _npy_header(shape: tuple[int, ...], dtype: str, *, fortran: bool) -> bytes:
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    return f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}".encode()
