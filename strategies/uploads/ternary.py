"""Sparse ternary compression: the places and signs of a vector's largest entries, and one magnitude for all of them.

Paper: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data,
    IEEE TNNLS 2020, https://arxiv.org/abs/1903.02891.
Symbols: T -> values; n -> size; p -> density; k = max(n p, 1) -> entries_of; mu -> Ternary.magnitude.
Where: the compression STC -> sparse_ternary; its Golomb code of the distances -> golomb_bits, encode.
Deviations: the unary parts of all code words precede all binary parts, so that both are read without a loop; the length
    is the same. Among entries of equal size the first ones are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import UploadError

Vector = npt.NDArray[np.float32]
GOLDEN = (math.sqrt(5) + 1) / 2


@dataclass(frozen=True)
class Ternary:
    """A vector whose entries are ``-magnitude``, 0 and ``magnitude``.

    Attributes:
        size: n, the number of all entries.
        places: Indices of the entries that are not 0: int64 [k], ascending.
        signs: Whether each of these is positive: bool [k].
        magnitude: mu, at least 0.
    """

    size: int
    places: npt.NDArray[np.int64]
    signs: npt.NDArray[np.bool_]
    magnitude: np.float32

    def dense(self) -> Vector:
        """Return the vector, float32 [n]."""
        found = np.zeros(self.size, np.float32)
        found[self.places] = np.where(self.signs, self.magnitude, -self.magnitude)
        return found


def entries_of(size: int, density: float) -> int:
    """Return k, the number of entries of ``size`` that are kept, at least one."""
    return max(1, int(size * density))


def sparse_ternary(values: Vector, density: float) -> Ternary:
    """Return STC(T): the k largest entries by magnitude, each replaced by its sign times their mean.

    Args:
        values: T, float32 [n], n at least 1.
        density: p in (0, 1].
    """
    kept, sizes = entries_of(len(values), density), np.abs(values)
    # Chosen by the threshold: the order of a partial sort depends on the processor.
    threshold = np.partition(sizes, len(values) - kept)[len(values) - kept]
    above = np.flatnonzero(sizes > threshold)
    level = np.flatnonzero(sizes == threshold)[: kept - len(above)]
    places = np.sort(np.concatenate([above, level])).astype(np.int64)
    magnitude = np.float32(sizes[places].mean(dtype=np.float64))
    return Ternary(len(values), places, values[places] > 0, magnitude)


def golomb_bits(density: float) -> int:
    """Return b*, the length of a code word's binary part: ``1 + floor(log2(log(phi - 1) / log(1 - p)))``."""
    if density >= 1.0:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(GOLDEN - 1) / math.log1p(-density))))


def encode(ternary: Ternary, density: float) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays to send: ``"bits"``, uint8, about ``log2(1/p) + 2`` bits per entry, and ``"magnitude"``.

    Each distance between two places is a quotient in unary and a remainder of :func:`golomb_bits` bits. The signs
    follow.
    """
    width, distances = golomb_bits(density), np.diff(ternary.places, prepend=-1) - 1
    quotients, rests = distances >> width, distances & ((1 << width) - 1)
    unary = np.ones(int(quotients.sum()) + len(quotients), np.uint8)
    unary[np.cumsum(quotients + 1) - 1] = 0
    binary = (rests[:, None] >> np.arange(width)) & 1
    bits = np.concatenate([unary, binary.astype(np.uint8).ravel(), ternary.signs.astype(np.uint8)])
    return {"bits": np.packbits(bits), "magnitude": np.array([ternary.magnitude], np.float32)}


def decode(arrays: Mapping[str, npt.NDArray[Any]], size: int, density: float, what: str) -> Ternary:
    """Return the vector that :func:`encode` turned into these arrays, which are validated.

    Args:
        arrays: ``"bits"`` and ``"magnitude"``.
        size: n.
        density: p.
        what: The arrays' name in the message.

    Raises:
        UploadError: The arrays are not a code of such a vector.
    """
    if set(arrays) != {"bits", "magnitude"} or arrays["bits"].dtype != np.uint8 or arrays["magnitude"].shape != (1,):
        raise UploadError(f"{what} holds {sorted(arrays)[:4]!s:.200}: must be 'bits', uint8, and one 'magnitude'")
    kept, width, bits = entries_of(size, density), golomb_bits(density), np.unpackbits(arrays["bits"].ravel())
    ends = np.flatnonzero(bits == 0)[:kept]
    unary = int(ends[-1]) + 1 if len(ends) else 0
    needed = unary + kept * (width + 1)
    if len(ends) < kept or not needed <= len(bits) < needed + 8:
        raise UploadError(f"{what} has {len(bits)} bits, which are not the code of {kept} entries")
    binary = bits[unary : unary + kept * width].reshape(kept, width).astype(np.int64)
    distances = ((np.diff(ends, prepend=-1) - 1) << width) + (binary << np.arange(width)).sum(1)
    places = np.cumsum(distances + 1) - 1
    magnitude = np.float32(arrays["magnitude"][0])
    if places[-1] >= size or not (np.isfinite(magnitude) and magnitude >= 0):
        raise UploadError(
            f"{what} has place {places[-1]} and magnitude {magnitude}: must be a place below {size} and a finite "
            "magnitude from 0"
        )
    return Ternary(size, places, bits[unary + kept * width : needed].astype(bool), magnitude)


def flat(arrays: Mapping[str, npt.NDArray[Any]]) -> Vector:
    """Return all values in one vector, in the order of names; float32 [n]."""
    return np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in sorted(arrays)])


def unflat(values: Vector, like: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
    """Return a vector as arrays of the shapes of ``like``, the inverse of :func:`flat`."""
    ends = np.cumsum([like[name].size for name in sorted(like)])
    pieces = np.split(values, ends[:-1])
    return {name: piece.reshape(like[name].shape) for name, piece in zip(sorted(like), pieces, strict=True)}
