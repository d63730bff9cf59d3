"""Polychotomous voting: every member votes for a class, and its earlier votes show how reliable it is.

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, Figure 8. Member i has a matrix
P_i, where P_i[r][c] is the share of the held examples of class r that it labels c. With equal priors and a benefit of
one for the right class, the most likely class is ``argmax_r prod_i P_i[r][vote_i]``. This module needs numpy alone.

The clients send counts, not shares: their sum gives the shares of the pooled examples. The paper averages the clients'
shares; its code pools the examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = np.ndarray[Any, Any]

# Replaces a share of zero, so that the product of many members' shares is not zero for every class. It is at most the
# share of one example in a million: a vote that never occurred counts more against a class than a rare one.
FLOOR = 1e-6


def vote_counts(logits: Array, labels: Array) -> npt.NDArray[np.int64]:
    """Count how each member labels the examples of each class.

    Args:
        logits: Of the members [M, B, C].
        labels: y [B], whole numbers in [0, C).

    Returns:
        Counts [M, C, C]: member, true class r, its vote c.
    """
    members, _, classes = logits.shape
    cells = (np.arange(members)[:, None] * classes + labels) * classes + logits.argmax(2)
    return np.bincount(cells.ravel(), minlength=members * classes**2).reshape(members, classes, classes)


def sum_votes(counts: Iterable[Array]) -> Array:
    """Return the counts of the pooled examples, the sum over clients.

    Args:
        counts: Of every client [M, C, C].

    Raises:
        ValueError: ``counts`` is empty.
    """
    tables = list(counts)
    if not tables:
        raise ValueError("no counts of votes to merge")
    total: Array = np.sum(tables, axis=0)
    return total


def vote_shares(counts: Array) -> npt.NDArray[np.float64]:
    """Return P [M, C, C] of merged counts.

    A class r without examples gets the uninformative row ``1 / #seen`` over the classes with examples. Without any
    examples every share is 1 / C.

    Args:
        counts: [M, C, C]: member, true class r, its vote c.
    """
    seen = counts.sum((0, 2)) > 0
    seen = seen if seen.any() else ~seen
    total = counts.sum(2, keepdims=True, dtype=np.float64)
    shares: npt.NDArray[np.float64] = np.where(total > 0, counts / np.maximum(total, 1), seen / seen.sum())
    return shares


def scores(counts: Array, logits: Array) -> npt.NDArray[np.float32]:
    """Return ``sum_i log max(P_i[r][vote_i], floor)`` for every class r [B, C]; the largest is the prediction.

    Args:
        counts: Merged [M, C, C].
        logits: Of the members [M, B, C].
    """
    logs = np.log(np.maximum(vote_shares(counts), FLOOR))
    votes = logits.argmax(2)
    # For each member and example, the column of its vote over all true classes: [M, B, C].
    likelihoods = logs[np.arange(len(logits))[:, None], :, votes]
    total: npt.NDArray[np.float32] = likelihoods.sum(0).astype(np.float32)
    return total
