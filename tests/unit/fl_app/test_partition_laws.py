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


def test_the_widest_sizes_that_settings_allow_are_numbers() -> None:
    for seed in range(100):
        sizes = laws.client_sizes(1003, 10, np.random.default_rng(seed), sigma=20.0)
        assert sizes.min() >= 0
        assert 1003 - 10 < sizes.sum() <= 1003


def test_lognormal_sizes_have_the_spread_of_sigma() -> None:
    sizes = laws.client_sizes(10_000_000, 2000, np.random.default_rng(0), sigma=1.2)
    assert np.log(sizes).std() == pytest.approx(1.2, abs=0.06)


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


def test_fill_takes_the_last_unused_position_of_a_class() -> None:
    by_class = [np.array([2, 5, 9]), np.array([1, 7])]
    (part,) = laws.fill(by_class, np.array([4]), np.random.default_rng(0), priors=np.array([[0.5, 0.5]]))
    for positions in by_class:
        taken = [p for p in part if p in positions]
        assert taken == positions[::-1][: len(taken)].tolist()


def test_fill_with_priors_on_exhausted_classes_goes_on_uniformly_with_the_others() -> None:
    by_class, priors = positions_by_class(2, 300, 300), np.array([[1.0, 0.0, 0.0]])
    (part,) = laws.fill(by_class, np.array([202]), np.random.default_rng(0), priors=priors)
    counts = np.histogram(part, bins=[0, 2, 302, 602])[0]
    assert counts[0] == 2
    assert abs(counts[1] - 100) < 30


def test_fill_renormalises_over_the_classes_that_are_left() -> None:
    by_class, priors = positions_by_class(2, 900, 900), np.array([[1 - 4e-12, 3e-12, 1e-12]])
    (part,) = laws.fill(by_class, np.array([802]), np.random.default_rng(0), priors=priors)
    assert np.histogram(part, bins=[0, 2, 902, 1802])[0][1] == pytest.approx(600, abs=50)


def test_fill_without_foreign_classes_closes_a_client_that_has_none_left() -> None:
    by_class, priors = positions_by_class(3, 20), np.array([[1.0, 0.0], [0.0, 1.0]])
    first, second = laws.fill(by_class, np.array([10, 10]), np.random.default_rng(0), priors=priors, foreign=False)
    assert sorted(first) == [0, 1, 2]
    assert len(second) == 10


def test_class_cuts_give_nothing_to_clients_of_average_size() -> None:
    proportions = iter([[0.5, 0.5, 0.0], [0.6, 0.2, 0.2], [0.8, 0.1, 0.1]])
    cuts = laws.class_cuts([10, 10, 10], 3, lambda: np.array(next(proportions)))
    # Client 0 holds 5 + 6 = 11 of on average 10 before the third class, which the others share by 0.1 : 0.1.
    assert cuts.tolist() == [[0, 5, 10, 10], [0, 6, 8, 10], [0, 0, 5, 10]]


def test_class_cuts_round_cumulated_proportions_down() -> None:
    cuts = laws.class_cuts([7], 3, lambda: np.array([0.4, 0.3, 0.3]))
    assert cuts.tolist() == [[0, 2, 4, 7]]


def test_class_cuts_with_all_mass_on_full_clients_share_the_class_equally() -> None:
    cuts = laws.class_cuts([9, 9, 9], 3, lambda: np.array([1.0, 0.0, 0.0]))
    assert cuts.tolist() == [[0, 9, 9, 9], [0, 0, 4, 9], [0, 0, 4, 9]]


@pytest.mark.slow
def test_weighted_draws_have_the_moments_of_draws_one_after_the_other() -> None:
    by_class, labels = positions_by_class(5, 2, 6), np.repeat([0, 1, 2], [5, 2, 6])
    mean, products = moments(lambda rng: laws.weighted_draws(by_class, 3, rng, alpha=2.0), labels, 3000)
    literal_mean, literal_products = moments(lambda rng: literal_weighted(labels, 3, 2.0, rng), labels, 3000)
    np.testing.assert_allclose(mean, literal_mean, atol=0.12)
    np.testing.assert_allclose(products, literal_products, atol=0.6)


def test_weighted_draws_with_too_few_weights_are_completed_uniformly() -> None:
    by_class = positions_by_class(10, 10, 10)
    others = np.zeros(30)
    for seed in range(300):
        # So small an alpha gives all mass to one class: its 10 examples, and 5 of the other 20.
        first, _ = laws.weighted_draws(by_class, 2, np.random.default_rng(seed), alpha=1e-5)
        counts = np.histogram(first, bins=[0, 10, 20, 30])[0]
        assert counts.max() == 10
        others[first] += counts[first // 10] < 10
    # Each example is one of another class with probability 2/3 and then taken with 1/4: 50 times of 300.
    assert others.min() > 25
    assert others.max() < 80


def test_laws_that_divide_classes_shuffle_them_first() -> None:
    by_class, rng = positions_by_class(200), np.random.default_rng(0)
    for first, *_ in (
        laws.some_classes(by_class, 2, rng, classes_per_client=1),
        laws.dirichlet_over_clients(by_class, 2, rng, alpha=50.0, min_size=1),
    ):
        # Positions from all over the class, where an unshuffled one would give its beginning.
        assert 80 < np.mean(first) < 120
        assert max(first) > 180
