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
    return normalize_rows(torch.softmax(logits.double(), dim=2).square().mean(1).sqrt())


def row_shares(rows: Tensor) -> Tensor:
    """Return ``||W_k[c]||^4``, normalised over classes.

    Args:
        rows: The Euclidean norms of the last layers' rows [M, C].

    Returns:
        [M, C], rows that sum to 1.
    """
    return normalize_rows(rows.double() ** 4)


def geometric_mean(one: Tensor, other: Tensor) -> Tensor:
    """Return ``sqrt(one * other)`` of two tables of shares [M, C], renormalised."""
    return normalize_rows((one.double() * other.double()).sqrt())


def normalize_rows(shares: Tensor) -> Tensor:
    """Return non-negative rows [M, C] divided by their sums; a row of zeros or with NaN or Inf becomes uniform."""
    shares = torch.where(shares.isfinite().all(1, keepdim=True), shares, torch.zeros_like(shares))
    total = shares.sum(1, keepdim=True)
    return torch.where(total > 0, shares / torch.where(total > 0, total, 1.0), 1 / shares.shape[1])


def cap_at_median(sizes: Tensor) -> Tensor:
    """Return numbers of examples [M], capped at the median of the positive ones: claiming too many gains nothing."""
    some = sizes[sizes > 0]
    return torch.minimum(sizes, some.median()) if len(some) else sizes


# Agreement of the clients' models on noise images, which shows models that learned something else.
#
# Models of one problem answer the same noise alike, class by class, even if their examples differ. A model trained on
# flipped labels, or on nothing, does not. Each pair is compared on the classes that both know. Agreement falls with the
# skew of the clients' examples, so no client is judged unless the others agree among themselves.
#
# It does not detect many attackers who agree with one another, false answers for a single class, or false counts with
# an honest model. Nor does it detect a model trained to answer this noise like the others: the noise follows from the
# run's seed, which clients know.


ENOUGH = 0.3  # median agreement of the others below which no client is judged


def find_agreeing(logits: Tensor, least: float) -> Tensor:
    """Return which members agree with the others.

    Members are removed one at a time, starting with the one that agrees least. Removal needs that the rest agree among
    themselves (median agreement at least :data:`ENOUGH`), and with this member less than ``least`` times that median.
    More than half of the members are kept.

    Args:
        logits: Of every member on noise [M, N, C].
        least: Share of the others' agreement that a member must have, in [0, 1].

    Returns:
        Whether a member is kept, bool [M].
    """
    table = correlations(logits)
    keep = torch.ones(len(table), dtype=torch.bool)
    while 2 * (int(keep.sum()) - 1) > len(table) and int(keep.sum()) > 2:
        members = keep.nonzero().flatten()
        worst = members[mean_correlations(table[members][:, members]).argmin()]
        rest = members[members != worst]
        usual = float(mean_correlations(table[rest][:, rest]).median())
        if usual < ENOUGH or float(table[worst, rest].mean()) >= least * usual:
            break
        keep[worst] = False
    return keep


def mean_correlations(table: Tensor) -> Tensor:
    """Return each member's mean correlation [M] with the others of a table [M, M], M >= 2."""
    return (table.sum(1) - table.diagonal()) / (len(table) - 1)


def correlations(logits: Tensor) -> Tensor:
    """Return how alike members answer noise, ``sum_c v_c corr_x(z_j(x)_c, z_k(x)_c)``.

    The weights of a pair are ``v_c ~ sqrt(g_j(c) g_k(c))``, with the shares g of :func:`.class_counts.response_shares`:
    a model's answers for classes that it never saw do not count.

    Args:
        logits: z of every member [M, N, C]; NaN and Inf count as 0, which agrees with nothing.

    Returns:
        Symmetric [M, M] float64, in [-1, 1].
    """
    z = torch.nan_to_num(logits.double(), nan=0.0, posinf=0.0, neginf=0.0)
    z = z - z.mean(1, keepdim=True)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    known = response_shares(logits).sqrt()
    pairs = torch.einsum("jnc,knc,jc,kc->jk", z, z, known, known)
    return pairs / (known @ known.T).clamp_min(torch.finfo(torch.float64).tiny)
