"""The laws of division, piece by piece: against literal loops, formulas and examples by hand."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from fl_app.data import laws
from fl_app.data.partitions import label_counts


def positions_by_class(*sizes: int) -> list[np.ndarray]:
    borders = np.cumsum([0, *sizes])
    return [np.arange(start, stop) for start, stop in itertools.pairwise(borders)]


def literal_fill(by_class: list[np.ndarray], sizes: np.ndarray, priors: np.ndarray, rng: np.random.Generator) -> list:
    """The fill loop as the papers' text has it: draw, reject, draw again."""
    left = [len(positions) for positions in by_class]
    room = sizes.tolist()
    cumulated = priors.cumsum(axis=1).tolist()
    parts: list[list[int]] = [[] for _ in room]
    while any(len(part) < size for part, size in zip(parts, room, strict=True)):
        client = int(rng.random() * len(room))
        if len(parts[client]) == room[client]:
            continue
        while True:
            label = min(bisect.bisect_right(cumulated[client], rng.random()), len(left) - 1)
            if left[label]:
                break
        left[label] -= 1
        parts[client].append(by_class[label][left[label]])
    return parts


def literal_weighted(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> list:
    parts, rest = [], np.arange(len(labels))
    for _ in range(num_clients - 1):
        weights = rng.dirichlet(np.full(3, alpha))[labels[rest]]
        taken = rng.choice(rest, len(labels) // num_clients, replace=False, p=weights / weights.sum())
        parts.append(taken)
        rest = np.setdiff1d(rest, taken)
    return [*parts, rest]


def moments(draw: Callable[[np.random.Generator], list], labels: np.ndarray, runs: int) -> tuple[np.ndarray, ...]:
    """Means of the label counts [n, C] and of their products [nC, nC] over many seeds."""
    counts = [label_counts(labels, draw(np.random.default_rng(seed)), 3).flatten() for seed in range(runs)]
    return np.mean(counts, axis=0), np.mean([np.outer(row, row) for row in counts], axis=0)


def test_lognormal_sizes_follow_the_formula() -> None:
    sizes = laws.client_sizes(1003, 10, np.random.default_rng(8), sigma=0.8)
    volumes = np.exp(np.log(100.3) + 0.8 * np.random.default_rng(8).standard_normal(10))
    assert sizes.tolist() == [int(v / sum(volumes) * 1003) for v in volumes]
    assert 1003 - 10 < sizes.sum() <= 1003


@pytest.mark.slow
def test_fill_with_fixed_priors_has_the_moments_of_the_rejection_loop() -> None:
    by_class, sizes = positions_by_class(5, 2, 6), np.array([4, 3, 5])
    labels = np.repeat([0, 1, 2], [5, 2, 6])
    priors = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.45, 0.5, 0.05]])
    mean, products = moments(lambda rng: laws.fill(by_class, sizes, rng, priors=priors), labels, 3000)
    literal_mean, literal_products = moments(lambda rng: literal_fill(by_class, sizes, priors, rng), labels, 3000)
    np.testing.assert_allclose(mean, literal_mean, atol=0.08)
    np.testing.assert_allclose(products, literal_products, atol=0.4)
    # The comparison can fail: equal priors are far away.
    uniform, _ = moments(lambda rng: laws.fill(by_class, sizes, rng, priors=np.ones((3, 3)) / 3), labels, 500)
    assert np.abs(uniform - literal_mean).max() > 0.3


@pytest.mark.slow
def test_dirichlet_over_classes_has_the_moments_of_the_rejection_loop() -> None:
    by_class, labels = positions_by_class(5, 2, 6), np.repeat([0, 1, 2], [5, 2, 6])

    def literal(rng: np.random.Generator) -> list:
        return literal_fill(by_class, np.array([4, 4, 4]), rng.dirichlet([1.5] * 3, size=3), rng)

    mean, products = moments(
        lambda rng: laws.dirichlet_over_classes(by_class, 3, rng, alpha=1.5, sigma=0), labels, 3000
    )
    literal_mean, literal_products = moments(literal, labels, 3000)
    np.testing.assert_allclose(mean, literal_mean, atol=0.12)
    np.testing.assert_allclose(products, literal_products, atol=0.6)


def test_class_cuts_round_cumulated_proportions_down() -> None:
    cuts = laws.class_cuts([7], 3, lambda: np.array([0.4, 0.3, 0.3]))
    assert cuts.tolist() == [[0, 2, 4, 7]]


@pytest.mark.slow
def test_weighted_draws_have_the_moments_of_draws_one_after_the_other() -> None:
    by_class, labels = positions_by_class(5, 2, 6), np.repeat([0, 1, 2], [5, 2, 6])
    mean, products = moments(lambda rng: laws.weighted_draws(by_class, 3, rng, alpha=2.0), labels, 3000)
    literal_mean, literal_products = moments(lambda rng: literal_weighted(labels, 3, 2.0, rng), labels, 3000)
    np.testing.assert_allclose(mean, literal_mean, atol=0.12)
    np.testing.assert_allclose(products, literal_products, atol=0.6)
