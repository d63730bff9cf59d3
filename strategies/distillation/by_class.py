"""Clients weighed class by class: a member counts for a generated example by what it has learned of its class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def class_weights(counts: Sequence[Sequence[int]]) -> Tensor:
    """Return ``w_{y,k} = n_k^y / sum_j n_j^y`` [M, C]; equal weights of a class that nobody holds.

    Args:
        counts: n_k^y [M, C].
    """
    held = torch.tensor(counts, dtype=torch.float64)
    total = held.sum(0, keepdim=True)
    return torch.where(total > 0, held / total.clamp_min(1.0), 1.0 / len(held)).float()
