"""The laws of division, called as the app calls them: sizes, coverage, reproducibility and refusals."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from fl_app.data import partitioners
from fl_app.data.partitions import BY_DOMAIN, PARTITIONERS, PartitionSpec, partition
from strategies.core.errors import DataError, OptionError

LABELS = np.random.default_rng(5).integers(0, 10, 1003)
DRAWN = tuple(law for law in PARTITIONERS if law != BY_DOMAIN)
DISJOINT = tuple(law for law in DRAWN if law != "dirichlet-overlap")


def spec_of(law: str, **values: float) -> PartitionSpec:
    return PartitionSpec(partition=law, sigma=0.4 if law == "lognormal" else 0.0, **values)  # type: ignore[arg-type]


def divide(law: str, *, seed: int = 0, num_clients: int = 10, **values: float) -> list[np.ndarray]:
    return partition(LABELS, spec_of(law, **values), num_clients=num_clients, num_classes=10, seed=seed)


def label_counts(labels: np.ndarray, parts: list, num_classes: int) -> np.ndarray:
    """Return the examples of each class at each client [n, C]."""
    return np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])


@pytest.mark.parametrize("alpha", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("law", DISJOINT)
def test_every_law_gives_disjoint_positions_that_are_reproducible(law: str, alpha: float) -> None:
    first, second, other = (divide(law, seed=seed, alpha=alpha, min_size=1) for seed in (1, 1, 2))
    together = np.concatenate(first)
    assert len(first) == 10
    assert all(part.dtype == np.int64 and len(part) for part in first)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < len(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_classes_p1_with_five_clients_walks_through_the_classes() -> None:
    parts = divide("classes-equal-size", num_clients=5, classes_per_client=3)
    own = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 0, 1}, {2, 3, 4}]
    assert [set(LABELS[part]) for part in parts] == own


@pytest.mark.parametrize(
    ("spec", "num_clients", "message"),
    [
        (PartitionSpec(), 41, "40 training examples for 41 clients: must be 1 to 40 clients"),
        (PartitionSpec(), 0, "40 training examples for 0 clients: must be 1 to 40 clients"),
        *(
            (PartitionSpec(law, classes_per_client=5), 2, "'data.classes-per-client' is 5: must be at most 4")
            for law in ("classes", "classes-equal-size")
        ),
        (PartitionSpec("dirichlet-clients"), 5, "'data.min-size' is 10: must be at most 8 where 5 clients share 40"),
    ],
)
def test_partition_of_an_impossible_request_is_one_clear_line(
    spec: PartitionSpec, num_clients: int, message: str
) -> None:
    labels = np.repeat(np.arange(4), 10)
    with pytest.raises((DataError, OptionError), match=message):
        partition(labels, spec, num_clients=num_clients, num_classes=4, seed=0)


def test_a_lognormal_law_without_a_deviation_is_refused() -> None:
    with pytest.raises(OptionError, match="'data.sigma' is 0.0: must be greater than 0 where 'data.partition' is"):
        PartitionSpec("lognormal")


def test_domains_when_there_is_one_per_client_go_to_the_clients_in_order() -> None:
    domains = np.array([1, 0, 2, 1, 0, 2, 2])
    labels, spec = np.zeros(7, dtype=np.int64), PartitionSpec(BY_DOMAIN)

    parts = partition(labels, spec, num_clients=3, num_classes=2, seed=0, domains=domains)

    assert [part.tolist() for part in parts] == [[1, 4], [0, 3], [2, 5, 6]]
    for wrong in (2, 4):
        with pytest.raises(OptionError, match=f"{wrong} clients where 'data.partition' is 'domains': must be 3, one"):
            partition(labels, spec, num_clients=wrong, num_classes=2, seed=0, domains=domains)
    with pytest.raises(
        OptionError, match="'data.partition' is 'domains': must be another one for a data set without domains"
    ):
        partition(labels, spec, num_clients=3, num_classes=2, seed=0)


@pytest.mark.parametrize("num_clients", [5, 10, 50, 100])
@pytest.mark.parametrize("held", [1, 2, 5, 10])
@pytest.mark.parametrize("law", ["classes", "classes-equal-size"])
def test_clients_hold_as_many_classes_as_asked_for(law: str, held: int, num_clients: int) -> None:
    labels = np.tile(np.arange(10), 500)
    spec = PartitionSpec(law, classes_per_client=held)

    counts = label_counts(labels, partition(labels, spec, num_clients=num_clients, num_classes=10, seed=1), 10)

    # P1's release gives equal sizes, filled at random: a class may be gone when a client comes to it.
    assert ((counts > 0).sum(axis=1) <= held).all()
    if law == "classes":
        assert ((counts > 0).sum(axis=1) == held).all()
        assert [int(row[client % 10] > 0) for client, row in enumerate(counts)] == [1] * num_clients
        assert counts.sum() == (len(labels) if num_clients >= 10 else counts.sum())
    else:
        assert counts.sum(axis=1).max() <= len(labels) // num_clients


# The laws of division, piece by piece: against literal loops, formulas and examples by hand.


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


Draw = Callable[[np.random.Generator], list]


def moments(draw: Draw, labels: np.ndarray, runs: int) -> tuple[np.ndarray, ...]:
    """Means of the label counts [n, C] and of their products [nC, nC] over many seeds."""
    counts = [label_counts(labels, draw(np.random.default_rng(seed)), 3).flatten() for seed in range(runs)]
    return np.mean(counts, axis=0), np.mean([np.outer(row, row) for row in counts], axis=0)


def test_lognormal_sizes_follow_the_formula() -> None:
    sizes = partitioners.client_sizes(1003, 10, np.random.default_rng(8), sigma=0.8)
    volumes = np.exp(np.log(100.3) + 0.8 * np.random.default_rng(8).standard_normal(10))
    assert sizes.tolist() == [int(v / sum(volumes) * 1003) for v in volumes]
    assert 1003 - 10 < sizes.sum() <= 1003


BY_CLASS = positions_by_class(5, 2, 6)
OWN = np.repeat([0, 1, 2], [5, 2, 6])


PRIORS = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.45, 0.5, 0.05]])
SIZES = np.array([4, 3, 5])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "literal", "apart"),
    [
        (
            lambda rng: partitioners.fill(BY_CLASS, SIZES, rng, priors=PRIORS),
            lambda rng: literal_fill(BY_CLASS, SIZES, PRIORS, rng),
            (0.08, 0.4),
        ),
        (
            lambda rng: partitioners.dirichlet_over_classes(BY_CLASS, 3, rng, alpha=1.5, sigma=0),
            lambda rng: literal_fill(BY_CLASS, np.array([4, 4, 4]), rng.dirichlet([1.5] * 3, size=3), rng),
            (0.12, 0.6),
        ),
        (
            lambda rng: partitioners.weighted_draws(BY_CLASS, 3, rng, alpha=2.0),
            lambda rng: literal_weighted(OWN, 3, 2.0, rng),
            (0.12, 0.6),
        ),
    ],
    ids=["fixed-priors", "dirichlet", "weighted"],
)
def test_divisions_have_the_moments_of_draws_one_after_the_other(
    draw: Draw, literal: Draw, apart: tuple[float, float]
) -> None:
    for found, wanted, most in zip(moments(draw, OWN, 3000), moments(literal, OWN, 3000), apart, strict=True):
        np.testing.assert_allclose(found, wanted, atol=most)
