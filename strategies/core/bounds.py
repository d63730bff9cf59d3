"""A bound on the influence of one client in one round: its change of the parameters against those of the others.

FedAdam divides by the root of a second moment that remembers a hundred rounds, so that one huge answer would stop the
training for all of them. The bound is far above the changes of honest clients under a skewed division.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
MOST = 5.0  # times the median norm of the round; honest clients at alpha 0.05 and 0.1 stay below 2
FEWEST = 3  # of two changes neither tells which one is too long


def shorten_changes(
    start: Arrays, ends: Sequence[Arrays], per: Sequence[float] = ()
) -> tuple[list[Arrays], list[float]]:
    """Shorten changes that are far longer than those of the other clients.

    Args:
        ends: The parameters of every client after its steps, of the same names and shapes.
        per: Divides the norm of each change, for rules that divide the changes; positive, empty for 1 each.

    Returns:
        The parameters, and every change's norm in medians of all norms. Of an even number the lower median counts.
        Changes longer than 5 medians are shortened to them. Parameters within the bound are returned as given. Fewer
        than 3 clients, or a median of 0, bound nothing, and every ratio is then 0.
    """
    norms = [_distance(start, end) / unit for end, unit in zip(ends, per or [1.0] * len(ends), strict=True)]
    median = _median(norms)
    ratios = [norm / median if median > 0 else 0.0 for norm in norms]
    return [
        end if ratio <= MOST else _towards(start, end, MOST / ratio) for end, ratio in zip(ends, ratios, strict=True)
    ], ratios


def shorten_step(start: Arrays, step: Arrays, ends: Sequence[Arrays], most: float = MOST) -> Arrays:
    """Shorten the server's step that is far longer than its clients' changes, as a reported factor can make it.

    Args:
        step: The server's step from there, float64: it may be longer than the parameters' own type can hold.
        most: The longest step, in medians of the norms of the clients' changes; see :func:`shorten_changes`.

    Returns:
        The step; one within the bound is returned as given.
    """
    median, length = _median([_distance(start, each) for each in ends]), _length(step.values())
    if not median or length <= most * median:
        return step
    return {name: value * (most * median / length) for name, value in step.items()}


class Bound:
    """The bound of all rounds of a run, with a note on every client that exceeds it.

    Attributes:
        notes: Lines for the log, one per client, until the caller takes them.
    """

    def __init__(self, what: str = "change") -> None:
        self._what = what
        self._known: set[str] = set()
        self.notes: list[str] = []

    def apply(self, number: int, start: Arrays, ends: Mapping[str, Arrays], per: Sequence[float] = ()) -> list[Arrays]:
        """Return the parameters of one round's clients within the bound, in their order; see :func:`shorten_changes`.

        Args:
            ends: Client -> its parameters.
            per: Divides the norm of each client's change; empty for 1 each.
        """
        found, ratios = shorten_changes(start, list(ends.values()), per)
        for client, ratio in zip(ends, ratios, strict=True):
            if ratio > MOST and client not in self._known:
                self._known.add(client)
                self.notes.append(
                    f"{client}'s {self._what} in round {number} is {ratio:.3g} times the median {self._what}: it "
                    f"counts as {MOST:g} times, in later rounds too"
                )
        return found


def _median(norms: Sequence[float]) -> float:
    """Return the lower median; 0 for too few."""
    return sorted(norms)[(len(norms) - 1) // 2] if len(norms) >= FEWEST else 0.0


def _distance(start: Arrays, end: Arrays) -> float:
    return _length(end[name].astype(np.float64) - value.astype(np.float64) for name, value in start.items())


def _length(parts: Iterable[Array]) -> float:
    return float(np.sqrt(np.sum([np.square(part).sum() for part in parts])))


def _towards(start: Arrays, end: Arrays, share: float) -> Arrays:
    moved = {name: value + share * (end[name].astype(np.float64) - value) for name, value in start.items()}
    return {name: value.astype(start[name].dtype) for name, value in moved.items()}
