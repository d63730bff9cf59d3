"""Sparse ternary compression: against an independent reference, and malformed code."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from strategies.core.errors import UploadError
from strategies.uploads.ternary import VALUES, Compression, Sparse


def vector(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(("size", "density"), [(1, 0.01), (7, 1.0), (1000, 0.01), (999, 0.2), (5000, 1 / 400)])
def test_ternary_is_the_largest_entries_signs_times_their_mean(size: int, density: float) -> None:
    values = vector(size)
    kept = max(1, math.floor(size * density))
    wanted = np.zeros(size)
    largest = np.argsort(-np.abs(values))[:kept]
    wanted[largest] = np.sign(values[largest]) * np.abs(values[largest]).mean()
    found = Compression(density).compress(values)
    np.testing.assert_allclose(found.dense(), wanted, rtol=1e-6)
    assert len(found.places) == Compression(density).entries_of(size) == kept


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("size", "density"), [(1, 0.01), (7, 1.0), (64, 0.5), (1000, 0.01), (50_000, 1 / 400)])
def test_code_goes_there_and_back_to_the_bit(size: int, density: float, values: str) -> None:
    one = Compression(density, values)
    sent = one.compress(vector(size))
    found = one.decode(one.encode(sent), size, "update")
    assert np.array_equal(found.dense(), sent.dense())
    assert found.dense().dtype == np.float32


def code_of(size: int, one: Compression) -> dict[str, Any]:
    return one.encode(one.compress(vector(size)))


def test_decode_refuses_an_invalid_code() -> None:
    one = Compression(0.01)
    good = code_of(1000, one)
    assert one.decode(good, 1000, "update").size == 1000
    bad: list[dict[str, Any]] = [
        {"bits": good["bits"]},
        {**good, "bits": good["bits"].astype(np.int64)},
        {**good, "magnitude": np.zeros(2, np.float32)},
        {**good, "magnitude": np.array([np.nan], np.float32)},
        {**good, "magnitude": np.array([-1.0], np.float32)},
        {**good, "bits": good["bits"][:-1]},
        {**good, "bits": np.append(good["bits"], np.uint8(0))},
        {**good, "bits": np.full(100, 255, np.uint8)},
        {**good, "bits": np.zeros(0, np.uint8)},
        code_of(1099, one),
        code_of(1000, Compression(0.01, "float16")),
    ]
    for arrays in bad:
        with pytest.raises(UploadError, match="^client-1: ternary"):
            one.decode(arrays, 1000, "client-1: ternary")


def test_decode_refuses_invalid_values_in_16_bits() -> None:
    one = Compression(0.01, "float16")
    good = code_of(1000, one)
    bad: list[dict[str, Any]] = [
        {"bits": good["bits"]},
        {**good, "values": good["values"].astype(np.float32)},
        {**good, "values": good["values"][:-1]},
        {**good, "values": np.where(np.arange(10) == 3, np.float16(np.inf), good["values"])},
        {**good, "bits": good["bits"][:-1]},
        {**good, "magnitude": np.ones(1, np.float32)},
        code_of(1000, Compression(0.01)),
    ]
    for arrays in bad:
        with pytest.raises(UploadError, match="^client-1: sparse"):
            one.decode(arrays, 1000, "client-1: sparse")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("size", "density"), [(1, 0.01), (7, 1.0), (300, 0.02), (1000, 0.01), (64, 0.5)])
def test_longest_code_is_decoded_and_no_longer_one_is_unpacked(
    size: int, density: float, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Compression(density, values)
    kept = one.entries_of(size)
    # All distances are 0 but the last, so that no code of this size has longer quotients.
    places = np.append(np.arange(kept - 1), size - 1)
    code = one.encode(Sparse(size, places, np.ones(kept, np.float32)))
    assert np.array_equal(one.decode(code, size, "update").places, places)
    longer = {**code, "bits": np.append(code["bits"], np.uint8(0))}
    monkeypatch.delattr(np, "unpackbits")
    with pytest.raises(
        UploadError, match=rf"^update has {len(longer['bits'])} bytes of bits: must be at most {len(code['bits'])},"
    ):
        one.decode(longer, size, "update")


def test_decode_of_a_bomb_takes_no_memory() -> None:
    one, bomb = Compression(0.01), np.zeros(2**20, np.uint8)
    tracemalloc.start()
    with pytest.raises(
        UploadError, match="update has 1048576 bytes of bits: must be at most 716, those of the longest"
    ):
        one.decode({"bits": bomb, "magnitude": np.ones(1, np.float32)}, 60_000, "update")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
