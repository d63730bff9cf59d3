"""The digest of weights, and the fingerprint of a feature function.

The fingerprint is its fields, which travel with every upload of sums, and a probe of its values. Sums add up only if
all clients have one and the same feature function, and the numbers do not show it. So each upload names weights,
preprocessing, projection and precision. A refusal says which of them differ, with both values.

A client can send the fields of one function and the sums of another. The probe finds that where the client did not
mean to deceive: it is 16 numbers of the features of one fixed input, which the client's own function computed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import refusals
from .errors import OptionError, StoreError

SIZE = 1024  # bytes of the fields on the wire, whatever the function, so that every fingerprint has one shape
PROBE = 16  # numbers of a probe
# Batches, threads and folded norms change features by at most 6e-6, relative; a wrong constant by more than 1e-2. In
# half precision the instructions of two processors differ by 9e-3, and float32 by 4e-2.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
_SHOWN = 80  # letters of a value in a message
_NONE = "nothing"

Weights = Mapping[str, Tensor | np.ndarray]


def dense(name: str, value: Tensor | np.ndarray) -> Tensor:
    """Return a contiguous tensor on the CPU, not necessarily a copy.

    Raises:
        StoreError: It is neither.
    """
    try:
        if isinstance(value, Tensor):
            return value.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
        # torch knows neither foreign byte orders nor negative strides; a copy has neither.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise StoreError(f"tensor {name!r}: a dense tensor or array is needed, found {type(value)}") from error


def weights_sha256(state: Weights) -> str:
    """Return a digest of weights themselves: sorted names, dtypes, shapes, bytes; no file format is part of it."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = dense(name, state[name])
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense tensor, see :func:`dense`."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def encode_fingerprint(fields: Mapping[str, Any]) -> Tensor:
    """Return the fields of a feature function as they travel: JSON, filled up with zeros, uint8 [1024].

    Args:
        fields: Names -> JSON values; a refusal names differences in this order.

    Raises:
        OptionError: They do not fit.
    """
    data = json.dumps(fields, separators=(",", ":")).encode()
    if len(data) > SIZE:
        raise OptionError(f"the fingerprint of the features has {len(data)} bytes: must be at most {SIZE}")
    return torch.tensor(list(data.ljust(SIZE, b"\0")), dtype=torch.uint8)


def decode_fingerprint(fingerprint: Tensor) -> dict[str, Any]:
    """Return the fields of a fingerprint from outside; empty if it holds none."""
    try:
        found = json.loads(bytes(fingerprint.flatten().tolist()).rstrip(b"\0"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def short_fingerprint(fingerprint: Tensor) -> str:
    """Return the name of a fingerprint: the first eight digits of its sha256."""
    return hashlib.sha256(bytes(fingerprint.flatten().tolist())).hexdigest()[:8]


def describe_difference(found: Tensor, expected: Tensor) -> str:
    """Return the fields in which two fingerprints differ, with both values; the first three of them."""
    one, other = decode_fingerprint(found), decode_fingerprint(expected)
    names = [name for name in dict.fromkeys([*other, *one]) if _value(one, name) != _value(other, name)]
    parts = [f"{name[:_SHOWN]}: {_value(one, name)}, expected is {_value(other, name)}" for name in names[:3]]
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return "; ".join([*parts, *more]) or "the form of the fields"


def check_fingerprint(found: Tensor, expected: Tensor) -> None:
    """Refuse what comes from another feature function.

    Raises:
        UploadError: Names the fields that differ, with both values.
    """
    if _without_build(found) != _without_build(expected):
        raise refusals.other_features(
            short_fingerprint(found), short_fingerprint(expected), describe_difference(found, expected)
        )


def probe_warning(upload: Mapping[str, Tensor], expected: Tensor) -> str:
    """Return a warning if a client's probe is not that of the server's function; empty if it is.

    Args:
        upload: The client's ``probe`` [16], finite, and its ``fingerprint``, which equals the server's.
        expected: The server's own [16].
    """
    found, precision = upload["probe"], str(decode_fingerprint(upload["fingerprint"]).get("precision"))
    apart = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12))
    if apart <= TOLERANCE.get(precision, TOLERANCE["float32"]):
        return ""
    return (
        f"its features of the probe differ by {apart:.2g} from the server's, though the fingerprint is equal: its sums "
        "may come from another function"
    )


def _without_build(fingerprint: Tensor) -> bytes:
    """Return its bytes without the build of a package: stored runs may have (torchvision 0.28.0+cu130)."""
    return re.sub(rb"\+\w+\)", b")", bytes(fingerprint.to(torch.uint8).flatten().tolist())).rstrip(b"\0")


def _value(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        return _NONE
    value = fields[name]
    text = f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)
    return text[:_SHOWN]
