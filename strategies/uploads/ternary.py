"""Sparse compression of a vector: the places of its largest entries, with their signs and one magnitude, or in 16 bits.

Paper: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data,
    IEEE TNNLS 2020, https://arxiv.org/abs/1903.02891: "ternary". Allouah et al., NeurIPS 2024,
    https://arxiv.org/abs/2411.07182, Section 5: half of the entries in 16 bits each, "float16".
Symbols: T -> values; n -> size; p -> density; k = max(n p, 1) -> entries_of; mu -> the magnitude.
Where: the compression STC -> compress; its Golomb code of the distances -> golomb_bits, encode.
Deviations: the unary parts of all code words precede all binary parts, so that both are read without a loop; the length
    is the same. Among entries of equal size the first ones are kept. Allouah et al. do not count the places of the
    entries; here they travel by the same code, at a density of 0.5 in one bit per entry of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core import refusals

Vector = npt.NDArray[np.float32]
LEAST_DENSITY = 1e-9  # the code words of far smaller ones have no length that can be computed
GOLDEN = (math.sqrt(5) + 1) / 2
VALUES = ("ternary", "float16")
_LARGEST = np.finfo(np.float16).max


@dataclass(frozen=True)
class Sparse:
    """A vector whose entries are 0 but for some.

    Attributes:
        size: n, the number of all entries.
        places: Indices of the others: int64 [k], ascending.
        values: These entries: float32 [k].
    """

    size: int
    places: npt.NDArray[np.int64]
    values: Vector

    def dense(self) -> Vector:
        """Return the vector, float32 [n]."""
        found = np.zeros(self.size, np.float32)
        found[self.places] = self.values
        return found


@dataclass(frozen=True)
class Compression:
    """The share of a vector's entries to keep, and their form.

    Attributes:
        density: p from :data:`LEAST_DENSITY` to 1, the share of the entries that are kept.
        values: One of :data:`VALUES`, the form of each.
    """

    density: float
    values: str = "ternary"

    def compress(self, vector: Vector) -> Sparse:
        """Return the k largest entries by magnitude: their signs times their mean magnitude, or rounded to 16 bits.

        Args:
            vector: T, float32 [n], n at least 1.
        """
        kept, sizes = self.entries_of(len(vector)), np.abs(vector)
        # Chosen by the threshold: the order of a partial sort depends on the processor.
        threshold = np.partition(sizes, len(vector) - kept)[len(vector) - kept]
        above = np.flatnonzero(sizes > threshold)
        level = np.flatnonzero(sizes == threshold)[: kept - len(above)]
        places = np.sort(np.concatenate([above, level])).astype(np.int64)
        if self.values == "float16":
            rounded = np.clip(vector[places], -_LARGEST, _LARGEST).astype(np.float16)
            return Sparse(len(vector), places, rounded.astype(np.float32))
        magnitude = np.float32(sizes[places].mean(dtype=np.float64))
        return Sparse(len(vector), places, np.where(vector[places] > 0, magnitude, -magnitude))

    def entries_of(self, size: int) -> int:
        """Return k, the number of entries of ``size`` that are kept, at least one."""
        return max(1, int(size * self.density))

    def encode(self, sparse: Sparse) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to send.

        ``"bits"``, uint8, has the places: each distance between two is a quotient in unary and a remainder of
        :func:`golomb_bits` bits. Signs follow, and ``"magnitude"`` is one number: about ``log2(1/p) + 2`` bits per kept
        entry. Or ``"values"`` has the entries, float16 [k].
        """
        width, distances = golomb_bits(self.density), np.diff(sparse.places, prepend=-1) - 1
        quotients, rests = distances >> width, distances & ((1 << width) - 1)
        unary = np.ones(int(quotients.sum()) + len(quotients), np.uint8)
        unary[np.cumsum(quotients + 1) - 1] = 0
        binary = (rests[:, None] >> np.arange(width)) & 1
        places = [unary, binary.astype(np.uint8).ravel()]
        if self.values == "float16":
            return {"bits": np.packbits(np.concatenate(places)), "values": sparse.values.astype(np.float16)}
        signs = (sparse.values > 0).astype(np.uint8)
        return {"bits": np.packbits(np.concatenate([*places, signs])), "magnitude": np.abs(sparse.values[:1])}

    def decode(self, arrays: Mapping[str, npt.NDArray[Any]], size: int, what: str) -> Sparse:
        """Return the vector that :meth:`encode` turned into these arrays, which are validated.

        Args:
            size: n.

        Raises:
            UploadError: The arrays are not a code of such a vector.
        """
        name, dtype, count = ("magnitude", "float32", 1)
        if self.values == "float16":
            name, dtype, count = ("values", "float16", self.entries_of(size))
        forms = {key: (str(array.dtype), array.size) for key, array in arrays.items() if array.ndim == 1}
        if forms.keys() != {"bits", name} or forms["bits"][0] != "uint8" or forms[name] != (dtype, count):
            raise refusals.broken_rule(
                f"{what} holds {sorted(arrays)[:4]!s:.200}", f"'bits', uint8, and {name!r}, {dtype}[{count}]"
            )
        places, signs = self._places(arrays["bits"], size, what)
        values = arrays[name].astype(np.float32)
        wrong = not np.isfinite(values).all() or (name == "magnitude" and values[0] < 0)
        if places[-1] >= size or wrong:
            raise refusals.broken_rule(
                f"{what} has place {places[-1]} and {name} {values[:3]}",
                f"a place below {size} and finite numbers, a magnitude from 0",
            )
        return Sparse(size, places, values if name == "values" else np.where(signs, values, -values))

    def _places(
        self, packed: npt.NDArray[Any], size: int, what: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the places of a code, and its signs where it has any."""
        kept, width = self.entries_of(size), golomb_bits(self.density)
        signed = self.values == "ternary"
        # Checked before each bit becomes a byte, and its place eight. The distances sum to size - kept at most, and
        # their quotients to that sum's; each entry also has the end of its quotient, a remainder and maybe a sign.
        most = -(-(kept * (1 + width + signed) + ((size - kept) >> width)) // 8)
        if packed.size > most:
            raise refusals.broken_rule(
                f"{what} has {packed.size} bytes of bits",
                f"at most {most}, those of the longest code of {kept} entries among {size}",
            )
        bits = np.unpackbits(packed.ravel())
        ends = np.flatnonzero(bits == 0)[:kept]
        unary = int(ends[-1]) + 1 if len(ends) else 0
        needed = unary + kept * (width + signed)
        if len(ends) < kept or not needed <= len(bits) < needed + 8:
            raise refusals.broken_rule(f"{what} has {len(bits)} bits", f"the code of {kept} entries")
        binary = bits[unary : unary + kept * width].reshape(kept, width).astype(np.int64)
        distances = ((np.diff(ends, prepend=-1) - 1) << width) + (binary << np.arange(width)).sum(1)
        return np.cumsum(distances + 1) - 1, bits[unary + kept * width : needed].astype(bool)


def golomb_bits(density: float) -> int:
    """Return b*, the length of a code word's binary part: ``1 + floor(log2(log(phi - 1) / log(1 - p)))``."""
    if density >= 1.0:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(GOLDEN - 1) / math.log1p(-density))))


def flatten_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Vector:
    """Return all values in one vector, in the order of names; float32 [n]."""
    return np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in sorted(arrays)])


def unflatten_arrays(values: Vector, like: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
    """Return a vector as arrays of the shapes of ``like``, the inverse of :func:`flatten_arrays`."""
    ends = np.cumsum([like[name].size for name in sorted(like)])
    pieces = np.split(values, ends[:-1])
    return {name: piece.reshape(like[name].shape) for name, piece in zip(sorted(like), pieces, strict=True)}
