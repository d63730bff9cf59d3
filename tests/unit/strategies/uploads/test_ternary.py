"""Sparse ternary compression: against an independent reference, and malformed code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from strategies.core.errors import UploadError
from strategies.uploads.ternary import decode, encode, entries_of, flat, golomb_bits, sparse_ternary, unflat


def vector(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_ternary_of_a_vector_matches_numbers_by_hand() -> None:
    found = sparse_ternary(np.array([0.5, -3.0, 0.0, 1.0, -0.25, 2.0], np.float32), 0.5)
    assert found.dense().tolist() == [0.0, -2.0, 0.0, 2.0, 0.0, 2.0]  # mean of 3, 1 and 2


@pytest.mark.parametrize(("size", "density"), [(1, 0.01), (7, 1.0), (1000, 0.01), (999, 0.2), (5000, 1 / 400)])
def test_ternary_is_the_largest_entries_signs_times_their_mean(size: int, density: float) -> None:
    values = vector(size)
    kept = max(1, math.floor(size * density))
    wanted = np.zeros(size)
    largest = np.argsort(-np.abs(values))[:kept]
    wanted[largest] = np.sign(values[largest]) * np.abs(values[largest]).mean()
    found = sparse_ternary(values, density)
    np.testing.assert_allclose(found.dense(), wanted, rtol=1e-6)
    assert len(found.places) == entries_of(size, density) == kept


def test_ternary_with_entries_of_one_size_takes_the_first() -> None:
    assert sparse_ternary(np.array([1, -1, 1, -1], np.float32), 0.5).dense().tolist() == [1.0, -1.0, 0.0, 0.0]
    assert sparse_ternary(np.zeros(4, np.float32), 0.5).dense().tolist() == [0.0] * 4


@pytest.mark.parametrize(("size", "density"), [(1, 0.01), (7, 1.0), (64, 0.5), (1000, 0.01), (50_000, 1 / 400)])
def test_code_goes_there_and_back_to_the_bit(size: int, density: float) -> None:
    sent = sparse_ternary(vector(size), density)
    found = decode(encode(sent, density), size, density, "update")
    assert np.array_equal(found.dense(), sent.dense())
    assert found.dense().dtype == np.float32


def test_code_with_a_place_at_the_end_goes_there_and_back() -> None:
    values = np.zeros(100_000, np.float32)
    values[-1] = -2.0
    sent = sparse_ternary(values, 1e-5)
    assert np.array_equal(decode(encode(sent, 1e-5), len(values), 1e-5, "update").dense(), values)


@pytest.mark.parametrize("density", [0.01, 0.05, 1 / 400])
def test_code_is_as_long_as_golomb_s_formula_says(density: float) -> None:
    sent = sparse_ternary(vector(200_000), density)
    width = golomb_bits(density)
    # Bits of a place on average, and one for its sign.
    wanted = width + 1 / (1 - (1 - density) ** (2**width)) + 1
    assert 8 * encode(sent, density)["bits"].size / len(sent.places) == pytest.approx(wanted, rel=0.01)
    assert width == 1 + math.floor(math.log2(math.log((math.sqrt(5) - 1) / 2) / math.log(1 - density)))


def test_decode_refuses_an_invalid_code() -> None:
    good = encode(sparse_ternary(vector(1000), 0.01), 0.01)
    assert decode(good, 1000, 0.01, "update").size == 1000
    bad: list[tuple[dict[str, Any], int]] = [
        ({"bits": good["bits"]}, 1000),
        ({**good, "bits": good["bits"].astype(np.int64)}, 1000),
        ({**good, "magnitude": np.zeros(2, np.float32)}, 1000),
        ({**good, "magnitude": np.array([np.nan], np.float32)}, 1000),
        ({**good, "magnitude": np.array([-1.0], np.float32)}, 1000),
        ({**good, "bits": good["bits"][:-1]}, 1000),
        ({**good, "bits": np.append(good["bits"], np.uint8(0))}, 1000),
        ({**good, "bits": np.full(100, 255, np.uint8)}, 1000),
        ({**good, "bits": np.zeros(0, np.uint8)}, 1000),
        (encode(sparse_ternary(vector(1099), 0.01), 0.01), 1000),
    ]
    refused = 0
    for arrays, size in bad:
        with pytest.raises(UploadError, match="^client-1: ternary"):
            decode(arrays, size, 0.01, "client-1: ternary")
        refused += 1
    assert refused == len(bad)


def test_decode_of_any_bits_refuses_or_gives_a_vector_of_the_size() -> None:
    rng = np.random.default_rng(3)
    length = len(encode(sparse_ternary(vector(300), 0.02), 0.02)["bits"])
    outcomes = set()
    for _ in range(300):
        bits = rng.integers(0, 256, length + rng.integers(-1, 2), dtype=np.uint8)
        try:
            found = decode({"bits": bits, "magnitude": np.ones(1, np.float32)}, 300, 0.02, "update")
            assert len(found.places) == 6
            assert found.dense().shape == (300,)
            outcomes.add("vector")
        except UploadError:
            outcomes.add("refused")
    assert outcomes == {"vector", "refused"}


def test_flat_and_back_keeps_shapes_whatever_the_order_of_names() -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.float32(7.0).reshape(())}
    values = flat(arrays)
    assert values.tolist() == [7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    back = unflat(values, dict(reversed(arrays.items())))
    assert all(np.array_equal(back[name], arrays[name]) and back[name].shape == arrays[name].shape for name in arrays)
