"""The choice of the examples that a client keeps from training, for the steps after its upload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.errors import OptionError
from ..core.facts import UNNAMED, Agreement
from ..core.seeds import derive_seed

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HoldoutRequest:
    """What the server's question says of the examples that the client held out of training.

    Attributes:
        share: Share of the client's examples that it held out.
        per_class: Whether it held out that share of every class.
        num_classes: C.
        test_share: Share of every class that it keeps for the evaluation of the result, see :func:`split_test`.
        expected: The run's classes and preprocessing, as far as they are named.
    """

    run_id: str
    seed: int
    share: float
    per_class: bool
    num_classes: int
    test_share: float = 0.0
    expected: Agreement = UNNAMED


def held_out(
    count: int,
    *,
    client: str,
    seed: int,
    share: float = 0.1,
    labels: npt.NDArray[np.integer] | None = None,
    groups: npt.NDArray[np.integer] | None = None,
) -> tuple[Positions, Positions]:
    """Divide a client's examples: positions to train on, and positions to hold out; both ascending.

    Args:
        count: n, the client's examples.
        client: The client's name; equal names and seeds give equal parts.
        share: Share of the examples to hold out, in [0, 1): ``int(share * n)`` examples.
        labels: The class of each example [n], to hold out the share of every class; None: of all examples together.
        groups: The group of each example [n], which is never cut: then the share is one of groups, each of the class of
            its first example. None if each is its own.

    Raises:
        OptionError: The share is out of range.
    """
    if not 0.0 <= share < 1.0:
        raise OptionError(f"the share of examples to keep is {share}: must be a number from 0, below 1")
    chosen, _ = _draw(
        np.zeros(count, np.int64) if labels is None else labels,
        groups,
        derive_seed(seed, "holdout", client),
        lambda size: int(share * size),
    )
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def _draw(
    labels: npt.NDArray[np.integer],
    groups: npt.NDArray[np.integer] | None,
    seed: int,
    count: Callable[[int], int],
) -> tuple[npt.NDArray[np.bool_], Positions]:
    """Draw whole groups of each class.

    Args:
        labels: The class of each example [n].
        groups: The group of each example [n]; None if each is its own.
        count: Number of a class's groups -> how many of them to draw.

    Returns:
        Whether each example is drawn [n], and the number of its group [n].
    """
    units, kinds = _units(labels, groups)
    order = np.random.default_rng(seed).permutation(len(kinds))
    chosen = np.zeros(len(kinds), bool)
    for kind in np.unique(kinds):
        own = order[kinds[order] == kind]
        chosen[own[: count(len(own))]] = True
    return chosen[units], units


def _units(labels: npt.NDArray[np.integer], groups: npt.NDArray[np.integer] | None) -> tuple[Positions, Positions]:
    """Return the number of each example's group [n], and the class of each group's first example."""
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    kinds = np.empty(int(units.max(initial=-1)) + 1, np.int64)
    kinds[units[::-1]] = labels[::-1]
    return units, kinds


def split_test(
    labels: npt.NDArray[np.integer],
    *,
    client: str,
    share: float,
    groups: npt.NDArray[np.integer] | None = None,
) -> tuple[Positions, Positions]:
    """Divide a client's examples: positions to train on, and test positions to score results on; both ascending.

    The draw depends on no seed of a run, so that a server cannot learn of single examples by asking for other draws; a
    larger share holds all of a smaller one. A class keeps at least one example, or one group, for training.

    Args:
        labels: The class of each example [n].
        share: Share of every class to test on, in [0, 0.5]; at least one example of a class with two or more.
        groups: The group of each example [n], such as a patient's number, which is never cut; None if each is its own.

    Returns:
        No test positions where the share is 0.
    """
    everything = np.arange(len(labels))
    if not share or not len(labels):
        return everything, everything[:0]
    test, units = _draw(
        labels,
        groups,
        derive_seed(0, "test", client),
        lambda size: max(1, round(share * size)) if size > 1 else 0,
    )
    for kind in np.setdiff1d(labels[test], labels[~test]):  # groups of several classes may take a whole class
        test[units == units[labels == kind][0]] = False
    return everything[~test], everything[test]


def halve(
    labels: npt.NDArray[np.integer], *, client: str, groups: npt.NDArray[np.integer] | None = None
) -> tuple[Positions, Positions]:
    """Divide test positions into two halves, each ascending: one reports scores, the other chooses among results.

    No group is cut, and the groups of a class differ by one at most; of an odd number the first half has one more. As
    in :func:`split_test` the draw depends on no seed of a run.

    Args:
        labels: The class of each test example [n].
        groups: The group of each example [n]; None if each is its own.
    """
    units, kinds = _units(labels, groups)
    order = np.random.default_rng(derive_seed(0, "halves", client)).permutation(len(kinds))
    order = order[np.argsort(kinds[order], kind="stable")]
    chooses = np.zeros(len(kinds), bool)
    chooses[order[1::2]] = True
    return np.flatnonzero(~chooses[units]), np.flatnonzero(chooses[units])
