"""Labels for generated examples, as frequent as among the clients' examples, and the clients' weights for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..method import Job, Progress

DRAWS = ("fixed", "independent")
PARTS = 1000  # estimates become integers: parts of an example
MOST = 10**9  # the most parts of all examples


def class_weights(counts: Sequence[Sequence[int]]) -> Tensor:
    """Return ``w_{y,k} = n_k^y / sum_j n_j^y`` [M, C]; equal weights for a class that no client holds.

    Args:
        counts: n_k^y [M, C].
    """
    held = torch.tensor(counts, dtype=torch.float64)
    total = held.sum(0, keepdim=True)
    return torch.where(total > 0, held / total.clamp_min(1.0), 1.0 / len(held)).float()


def draw_labels(held: Sequence[int], count: int, draw: str, rng: torch.Generator) -> Tensor:
    """Return labels [count] with p(y) = n^y / sum_c n^c, in a random order; a class with n^y = 0 is never drawn.

    The arithmetic is in integers, so that rounding changes no label.

    Args:
        held: n^y at least 0, not all zero [C]; shares of :data:`MOST` replace more examples than that.
        count: The number of labels.
        draw: ``"fixed"``: class c gets the places from ``floor(P(c - 1) count)`` to ``floor(P(c) count)``, P the
            cumulative p, then all are shuffled; ``"independent"``: each label is drawn independently.
        rng: A CPU generator.
    """
    if (claimed := sum(held)) > MOST:  # the products below must stay within 64 bits
        held = [max(min(count, 1), count * MOST // claimed) for count in held]
    ends = torch.tensor(held, dtype=torch.int64).cumsum(0)
    total = int(ends[-1])
    if draw == "independent":
        return torch.searchsorted(ends, torch.randint(total, (count,), generator=rng), right=True)
    places = ends * count // total
    labels = torch.searchsorted(places, torch.arange(count), right=True)
    return labels[torch.randperm(count, generator=rng)]


def shares_of(
    job: Job, progress: Progress, *, labels: str, weights: str, found: Tensor | None = None
) -> tuple[list[int], Tensor]:
    """Return the frequency of each class among drawn labels, and each client's weight for an example of the class.

    Args:
        job: Supplies the uploads' label counts.
        progress: Receives a note if they are missing.
        labels: ``"counts"``, or ``"uniform"``: every class that some client holds equally often.
        weights: ``"per-class"``: alpha^{k,y} = n_k^y / sum_j n_j^y; or ``"uniform"``: 1/M.
        found: Another n [M, C], such as estimates, which replaces the uploaded counts.

    Returns:
        n^y [C], not all zero, and alpha [M, C]. If a client's counts are unknown, both are uniform.
    """
    members, classes = len(job.uploads), job.num_classes
    equal = torch.full((members, classes), 1.0 / members)
    counts = [upload.label_counts for upload in job.uploads if upload.label_counts is not None]
    silent = [upload.client for upload in job.uploads if not any(upload.label_counts or ())]
    if found is not None:
        parts = found.double() * min(PARTS, MOST / max(1.0, float(found.double().sum())))
        counts = [tuple(row) for row in parts.round().long().tolist()]
    held = [sum(column) for column in zip(*counts, strict=True)]
    if len(counts) < members or not any(held):
        if labels == "counts" or weights == "per-class":
            progress.record(
                {"note": f"no label counts from {', '.join(silent)}: all classes and clients weigh the same"}
            )
        return [1] * classes, equal
    drawn = held if labels == "counts" else [int(count > 0) for count in held]
    return drawn, class_weights(counts) if weights == "per-class" else equal
