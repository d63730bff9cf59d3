"""The bound on a client's change of the parameters, against medians by hand."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.core.bounds import MOST, bounded, bounded_step

START = {"a": np.array([1.0, 2.0], np.float32), "b": np.array([[3.0]], np.float32)}


def moved(length: float) -> dict[str, np.ndarray]:
    """Return parameters at a distance from the start, along (0.6, 0, 0.8)."""
    return {"a": START["a"] + np.array([0.6, 0.0], np.float32) * length, "b": START["b"] + np.float32(0.8 * length)}


def distance(end: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(end[name] - value).sum() for name, value in START.items())))


def test_changes_within_the_bound_are_returned_as_given() -> None:
    ends = [moved(1.0), moved(2.0), moved(2.0 * MOST - 0.1)]

    found, ratios = bounded(START, ends)

    assert all(np.array_equal(one[name], other[name]) for one, other in zip(found, ends, strict=True) for name in START)
    assert ratios == pytest.approx([0.5, 1.0, MOST - 0.05], rel=1e-5)


@pytest.mark.parametrize("length", [1e2, 1e4, 9e8])
def test_a_longer_change_keeps_its_direction_and_ends_at_the_bound(length: float) -> None:
    found, ratios = bounded(START, [moved(1.0), moved(length), moved(2.0), moved(1.5)])

    assert distance(found[1]) == pytest.approx(1.5 * MOST, rel=1e-3)
    assert found[1]["a"][1] == START["a"][1]
    assert found[1]["a"].dtype == np.float32
    assert ratios[1] == pytest.approx(length / 1.5, rel=1e-3)


@pytest.mark.parametrize("ends", [[], [moved(1e6)], [moved(1.0), moved(1e6)], [moved(0.0), moved(0.0), moved(1e6)]])
def test_two_changes_and_a_median_of_zero_bound_nothing(ends: list[dict[str, np.ndarray]]) -> None:
    found, ratios = bounded(START, ends)

    assert [distance(one) for one in found] == [distance(one) for one in ends]
    assert set(ratios) <= {0.0}


def along(length: float) -> dict[str, np.ndarray]:
    """Return a step of a length, along (0.6, 0, 0.8)."""
    return {"a": np.array([0.6 * length, 0.0]), "b": np.array([[0.8 * length]])}


@pytest.mark.parametrize("length", [1e2, 1e30, 1e99])  # float32 ends at 3.4e38
def test_a_longer_step_of_the_server_is_as_long_as_the_bound_says(length: float) -> None:
    found = bounded_step(START, along(length), [moved(1.0), moved(1.5), moved(2.0)], 2.0)
    assert (found["a"], found["b"]) == (pytest.approx([1.8, 0.0]), pytest.approx(np.array([[2.4]])))
