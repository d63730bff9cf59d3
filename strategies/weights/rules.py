"""The rules of merging in weight space, for one tensor of all clients at a time.

Symbols: K clients; tau_k = theta_k - theta_0, a client's update of one tensor from the start that all clients share;
w_k >= 0, sum_k w_k = 1. A rule returns the merged update tau in float64, and the merged tensor is theta_0 + s tau with
a scale s. Every rule takes finite updates of one shape. If all clients are equal and nothing is dropped or cut, the
result is their update. The order of clients does not matter beyond the rounding of float64.

Sources:
    Task arithmetic: Ilharco et al., Editing Models with Task Arithmetic, ICLR 2023, https://arxiv.org/abs/2212.04089.
    TIES: Yadav et al., TIES-Merging: Resolving Interference When Merging Models, NeurIPS 2023,
        https://arxiv.org/abs/2306.01708, Algorithm 1.
    DARE: Yu et al., Language Models are Super Mario, ICML 2024, https://arxiv.org/abs/2311.03099.
    Fisher: Matena, Raffel, Merging Models with Fisher-Weighted Averaging, NeurIPS 2022,
        https://arxiv.org/abs/2111.09832.
    RegMean: Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023,
        https://arxiv.org/abs/2212.09849.
    TSV: Gargiulo et al., Task Singular Vectors: Reducing Task Interference in Model Merging, CVPR 2025,
        https://arxiv.org/abs/2412.00081, TSV-Merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

FISHER_FLOOR = 1e-6  # of a tensor's largest Fisher entry; below it clients weigh as in the average
RIDGE = 1e-9  # of the mean diagonal entry of the summed Gram matrices
# Directions below these shares of the largest are rounding: of an update, and of the stacked singular vectors.
LEAST_SINGULAR, LEAST_ANGLE = 1e-6, 1e-3


def widest_dtype(values: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype that holds the numbers of all tensors: float32 for float16 and bfloat16, say."""
    return reduce(torch.promote_types, (value.dtype for value in values))


def average(updates: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum_k w_k tau_k, the rule of FedAvg and of task arithmetic.

    Args:
        updates: tau_k, K tensors of one shape.
        weights: w_k [K].
    """
    total = torch.zeros(updates[0].shape, dtype=torch.float64)
    for update, weight in zip(updates, weights, strict=True):
        total.add_(update, alpha=weight)
    return total


def trim(update: Tensor, density: float) -> Tensor:
    """Return an update with its largest entries kept and all others 0, the first step of TIES.

    Kept are ``max(1, round(d n))`` of n entries, halves rounded up: exactly so many, of equal magnitudes the first.
    Algorithm 1 trims the whole model as one vector; here each tensor keeps its share.

    Args:
        update: tau_k.
        density: d, in (0, 1].
    """
    flat = update.flatten()
    if not (count := len(flat)):
        return update
    kept = min(count, max(1, math.floor(density * count + 0.5)))
    sizes = flat.abs()
    least = sizes.kthvalue(count - kept + 1).values
    mask = sizes > least
    equal = (sizes == least).nonzero()[: kept - int(mask.sum())]
    mask[equal] = True
    return (flat * mask).reshape(update.shape)


def ties(updates: Sequence[Tensor], density: float) -> Tensor:
    """Return the mean of the kept entries that have the elected sign; Algorithm 1 of TIES.

    The elected sign is that of the sum of the trimmed updates. Where the sum is 0 the result is 0, so that negative
    updates give the negative result. Numbers of examples do not weigh.

    Args:
        updates: tau_k, K tensors of one shape.
        density: d of :func:`trim`.
    """
    trimmed = [trim(update, density) for update in updates]
    sign = average(trimmed, [1.0] * len(trimmed)).sign()
    total, count = torch.zeros_like(sign), torch.zeros_like(sign)
    for update in trimmed:
        agrees = (update.sign() == sign) & (sign != 0)
        total.add_(update * agrees)
        count.add_(agrees)
    return total / count.clamp_min(1.0)


def drop_and_rescale(update: Tensor, drop: float, generator: torch.Generator) -> Tensor:
    """Return an update with random entries set to 0 and the others divided by 1 - p, the step that names DARE.

    Args:
        update: tau_k.
        drop: p, the probability of 0 for each entry, in [0, 1).
        generator: Of this client and tensor, so that the order of clients and tensors does not matter.
    """
    kept = torch.rand(update.shape, generator=generator) >= drop
    return update * kept / (1.0 - drop)


def fisher(updates: Sequence[Tensor], weights: Sequence[float], diagonals: Sequence[Tensor]) -> Tensor:
    """Return sum_k w_k F_k tau_k / sum_k w_k F_k, entry by entry.

    It equals the Fisher-weighted average of the theta_k less theta_0. F_k is floored at 1e-6 times the largest entry of
    all clients, so that an entry that no client's examples depend on is averaged. The floor is this library's own.

    Args:
        updates: tau_k, K tensors of one shape.
        weights: w_k [K].
        diagonals: F_k >= 0, the mean square of each entry's gradient over a client's examples, of that shape.
    """
    largest = max((float(diagonal.max()) for diagonal in diagonals if diagonal.numel()), default=0.0)
    floor = FISHER_FLOOR * largest or 1.0
    total = torch.zeros(updates[0].shape, dtype=torch.float64)
    norm = torch.zeros_like(total)
    for update, weight, diagonal in zip(updates, weights, diagonals, strict=True):
        share = weight * diagonal.double().clamp_min(floor)
        total += share * update
        norm += share
    return total / norm


def regmean(
    updates: Sequence[Tensor], weights: Sequence[float], grams: Sequence[Tensor], off_diagonal: float
) -> Tensor:
    """Return the update M that minimises ``sum_k ||M X_k - tau_k X_k||^2``, with X_k the inputs of client k's layer.

    ``M = (sum_k tau_k G_k) (sum_k G_k)^-1``. The same small ridge, 1e-9 of the mean diagonal entry of the sum, is on
    both sides, times w_k: inputs that no client has are averaged.

    Args:
        updates: tau_k [O, D], the bias as the last column if the layer has one.
        weights: w_k [K].
        grams: G_k = X_k X_k^T [D, D], sums over a client's examples, with a row of ones in X_k for the bias.
        off_diagonal: The factor of the entries off the diagonal, in [0, 1]; 0.9 in the paper.
    """
    width = len(grams[0])
    shrunk = [
        off_diagonal * gram.double() + (1.0 - off_diagonal) * torch.diag(gram.double().diagonal()) for gram in grams
    ]
    ridge = RIDGE * float(sum(float(gram.trace()) for gram in shrunk)) / max(1, width) or 1.0
    whole = torch.zeros(width, width, dtype=torch.float64)
    moved = torch.zeros(updates[0].shape, dtype=torch.float64)
    for update, weight, gram in zip(updates, weights, shrunk, strict=True):
        own = gram + weight * ridge * torch.eye(width, dtype=torch.float64)
        whole += own
        moved += update.double() @ own
    solution: Tensor = torch.linalg.solve(whole, moved.T).T
    return solution


def tsv(updates: Sequence[Tensor]) -> Tensor:
    """Return the sum of the clients' leading singular directions, decorrelated; TSV-Merge.

    Each update U S V^T is cut to ``max(1, n // K)`` of its n = min(O, D) singular values. The U of all clients stand
    side by side, and so do the V. Each stack is replaced by the nearest matrix with orthonormal columns, P Q^T of its
    SVD P D Q^T, and the product is ``U_ S V_^T``. Sizes do not weigh.

    Singular values below a share of the largest are rounding and are left out, of the updates and of the stacks: a
    client without change has no say, and K equal clients give the cut update once. That limit is this library's own.

    Args:
        updates: tau_k [O, D].
    """
    kept = max(1, min(updates[0].shape) // len(updates))
    parts = [torch.linalg.svd(update.double(), full_matrices=False) for update in updates]
    least = LEAST_SINGULAR * max(float(size.max()) for _, size, _ in parts)
    ranks = [min(kept, int((size > least).sum())) for _, size, _ in parts]
    if not any(ranks):
        return torch.zeros(updates[0].shape, dtype=torch.float64)
    sizes = torch.cat([size[:rank] for (_, size, _), rank in zip(parts, ranks, strict=True)])
    lefts = [left[:, :rank] for (left, _, _), rank in zip(parts, ranks, strict=True)]
    rights = [right[:rank].T for (_, _, right), rank in zip(parts, ranks, strict=True)]
    left, right = (_nearest_orthonormal(torch.cat(stack, dim=1)) for stack in (lefts, rights))
    return (left * sizes) @ right.T


def _nearest_orthonormal(vectors: Tensor) -> Tensor:
    """Return P Q^T of the SVD P D Q^T of some columns, without the directions that the columns do not span."""
    left, size, right = torch.linalg.svd(vectors, full_matrices=False)
    spanned = size > LEAST_ANGLE * size[0]
    nearest: Tensor = left[:, spanned] @ right[spanned]
    return nearest
