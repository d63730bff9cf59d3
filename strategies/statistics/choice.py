"""The penalty and the value of clients, by leaving clients out of the sums: no test data, no further message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..core.seeds import generator
from ..method import Progress
from .heads import LAMBDAS, SHRINKAGES, Head, Lda, Ridge, fallback_penalties, ridge_head, squared_error
from .sums import Statistics

# Up to so many clients each is a fold of its own; more are dealt to ten folds.
SINGLE_FOLDS, FOLDS = 20, 10
# Errors per example closer than this are equal, and the larger penalty wins.
TIE = 1e-6


@dataclass(frozen=True)
class ChosenPenalty:
    """A penalty, chosen by the loss of held-out clients.

    Attributes:
        curve: Candidate -> loss per held-out example; empty if no client could be left out.
        by_client: Client, or the clients of a fold joined by a space -> its loss per example at the chosen value.
    """

    value: float
    curve: Mapping[float, float]
    by_client: Mapping[str, float]

    def record(self, progress: Progress, name: str) -> None:
        """Record the curve, a row per candidate, and the loss of every client or fold at the chosen value.

        Args:
            name: Of the penalty, ``"lambda"`` or ``"shrinkage"``.
        """
        for candidate, loss in self.curve.items():
            progress.record({name: candidate, "left_out_error": loss})
        for fold, loss in self.by_client.items():
            progress.record({"client": fold, "left_out_error": loss})


def choose_penalty(clients: Mapping[str, Statistics], *, seed: int, grid: Sequence[float] = LAMBDAS) -> ChosenPenalty:
    """Choose ridge's lambda by the squared error of every fold under the head of the others.

    Args:
        seed: Of the run; deals more than 20 clients to ten folds.
        grid: Candidates, ascending.
    """

    def losses(others: Statistics, held_out: Statistics) -> list[float]:
        ridge = Ridge(others)
        return [squared_error(ridge.head(penalty), held_out) for penalty in grid]

    return _choose(clients, grid, losses, seed=seed, alone=0)


def choose_shrinkage(clients: Mapping[str, Statistics], *, seed: int) -> ChosenPenalty:
    """Choose LDA's shrinkage by the negative log-likelihood of every fold under the others.

    Args:
        seed: Of the run; deals more than 20 clients to ten folds.
    """

    def losses(others: Statistics, held_out: Statistics) -> list[float]:
        lda = Lda(others)
        return [-lda.log_likelihood(held_out, shrinkage) for shrinkage in SHRINKAGES]

    return _choose(clients, SHRINKAGES, losses, seed=seed, alone=1)


def deal_folds(names: Sequence[str], seed: int) -> list[tuple[str, ...]]:
    """Deal clients to folds: each its own up to 20 clients, else ten folds drawn by the seed."""
    ordered = sorted(names)
    if len(ordered) <= SINGLE_FOLDS:
        return [(name,) for name in ordered]
    drawn = torch.randperm(len(ordered), generator=generator(seed, "statistics", "folds")).tolist()
    return [tuple(sorted(ordered[k] for k in drawn[fold::FOLDS])) for fold in range(FOLDS)]


def value_clients(clients: Mapping[str, Statistics], penalty: float, *, seed: int = 0) -> dict[str, float]:
    """Return the value of every client to the others, without test data.

    ``v_j = sum over k of [E_k(without j and k) - E_k(without k)] / sum over k of n_k``, over the folds k of
    :func:`deal_folds` that j is not in: how much larger the left-out error per example would be without j. A negative
    value is no proof of harm where classes are skewed.

    Args:
        clients: Name -> statistics, of at least 3 clients. K take K (K - 1) / 2 solves up to 20, 10 K above.
        penalty: lambda.
        seed: Of the run; deals more than 20 clients to ten folds.

    Raises:
        ValueError: There are fewer than 3 clients.
    """
    names = sorted(clients)
    if len(names) < 3:
        raise ValueError(f"the value of {len(names)} clients is not defined: must be at least 3")
    total = Statistics.total(clients[name] for name in names)
    lost, judged = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    pairs = dict[frozenset[str], Head]()  # of two single clients, which judge each other
    for fold in deal_folds(names, seed):
        held_out = Statistics.total(clients[name] for name in fold)
        rest = total - held_out
        error = squared_error(ridge_head(rest, penalty), held_out)
        for name in names:
            if name in fold:
                continue
            head = pairs.pop(key := frozenset((name, *fold)), None)
            if head is None:
                head = ridge_head(rest - clients[name], penalty)
                if len(fold) == 1:
                    pairs[key] = head
            lost[name] += squared_error(head, held_out) - error
            judged[name] += held_out.examples
    return {name: lost[name] / judged[name] for name in names}


def _choose(
    clients: Mapping[str, Statistics],
    grid: Sequence[float],
    losses: Callable[[Statistics, Statistics], list[float]],
    *,
    seed: int,
    alone: int,
) -> ChosenPenalty:
    total = Statistics.total(clients[name] for name in sorted(clients))
    folds = deal_folds(list(clients), seed)
    found: dict[str, tuple[list[float], float]] = {}
    for fold in folds if len(folds) > 1 else []:
        held_out = Statistics.total(clients[name] for name in fold)
        found[" ".join(fold)] = losses(total - held_out, held_out), held_out.examples
    if not found:
        return ChosenPenalty(fallback_penalties(total)[alone], {}, {})
    mean = [sum(row[k] for row, _ in found.values()) / total.examples for k in range(len(grid))]
    best = max(k for k, loss in enumerate(mean) if loss <= min(mean) + TIE)
    by_client = {fold: row[best] / max(1.0, examples) for fold, (row, examples) in found.items()}
    return ChosenPenalty(grid[best], dict(zip(grid, mean, strict=True)), by_client)
