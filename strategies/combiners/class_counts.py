"""Estimates of a client's class shares from its model alone.

A network trained on few examples of a class seldom predicts it, whatever the image, and has small weights in that
class's row of its last layer. Both suffice to weigh an ensemble's clients class by class without their label counts.
They also reveal a client's class shares to anyone who holds its weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def response_shares(logits: Tensor) -> Tensor:
    """Return g_k(c), the normalised root mean square of ``softmax(z_k(x))_c`` over noise images.

    Args:
        logits: z of every member on noise [M, N, C].

    Returns:
        [M, C], rows that sum to 1.
    """
    return normalised(torch.softmax(logits.double(), dim=2).square().mean(1).sqrt())


def row_shares(rows: Tensor) -> Tensor:
    """Return ``||W_k[c]||^4``, normalised over classes.

    Args:
        rows: The Euclidean norms of the last layers' rows [M, C].

    Returns:
        [M, C], rows that sum to 1.
    """
    return normalised(rows.double() ** 4)


def geometric_mean(one: Tensor, other: Tensor) -> Tensor:
    """Return ``sqrt(one * other)`` of two tables of shares [M, C], renormalised."""
    return normalised((one.double() * other.double()).sqrt())


def normalised(shares: Tensor) -> Tensor:
    """Return non-negative rows [M, C] divided by their sums; a row of zeros or with NaN or Inf becomes uniform."""
    shares = torch.where(shares.isfinite().all(1, keepdim=True), shares, torch.zeros_like(shares))
    total = shares.sum(1, keepdim=True)
    return torch.where(total > 0, shares / torch.where(total > 0, total, 1.0), 1 / shares.shape[1])


def capped(sizes: Tensor) -> Tensor:
    """Return numbers of examples [M], capped at the median of the positive ones: claiming too many gains nothing."""
    some = sizes[sizes > 0]
    return torch.minimum(sizes, some.median()) if len(some) else sizes
