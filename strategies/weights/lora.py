"""Arithmetic of low-rank updates: sums, the best approximation of a lower rank, and KnOTS's common basis.

An update of a weight matrix is Delta = left @ right, and no function here makes the matrix itself of its arguments but
:meth:`LowRank.dense`. All of them take stacks of matrices too, with the same leading dimensions.

Sources: Hu et al., LoRA, ICLR 2022, Section 4.1 (Delta = s B A); Wang et al., FLoRA, NeurIPS 2024, Section 3.2 (stacked
    factors are the exact sum of the updates); Stoica et al., Model merging with SVD to tie the Knots, ICLR 2025,
    Section 4 (KnOTS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Directions below this share of the largest singular value are rounding errors, in double precision.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class LowRank:
    """An update as two factors.

    Attributes:
        left: [..., out, r].
        right: [..., r, in].
    """

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """The number r of columns of ``left``, which the rank of the matrix does not exceed."""
        return int(self.left.shape[-1])

    @property
    def full_rank(self) -> int:
        """The smaller one of out and in, which no useful r exceeds."""
        return int(min(self.left.shape[-2], self.right.shape[-1]))

    def dense(self) -> Tensor:
        """Return the matrix [..., out, in]."""
        return self.left @ self.right

    def norm(self) -> float:
        """Return the Frobenius norm, over a stack as a whole."""
        return float((torch.linalg.qr(self.left).R @ torch.linalg.qr(self.right.mT).R.mT).square().sum().sqrt())

    def padded(self, rank: int) -> LowRank:
        """Return the same update with columns and rows of 0, up to a rank."""
        more = max(0, rank - self.rank)
        pad = torch.nn.functional.pad
        return LowRank(pad(self.left, (0, more)), pad(self.right, (0, 0, 0, more)))


def stack_updates(updates: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Return ``sum_k w_k Delta_k`` exactly, with the sum of the ranks (FLoRA, Eq. (4)).

    Args:
        updates: Of one matrix, at least one; their ranks may differ.
        weights: w_k, of any sign; one per update.
    """
    pairs = list(zip(updates, weights, strict=True))
    return LowRank(
        torch.cat([each.left for each, _ in pairs], dim=-1), torch.cat([w * each.right for each, w in pairs], dim=-2)
    )


def cut_rank(update: LowRank, rank: int) -> tuple[LowRank, float]:
    """Return the best approximation of a rank in the Frobenius norm, and what it loses.

    The two factors are orthogonalised by QR, and the SVD is that of the core [r, r] between them.

    Args:
        update: In double precision; an SVD in single precision loses half of the digits.
        rank: The new rank; a larger one than that of the matrix pads nothing.

    Returns:
        The approximation, its singular values shared equally by both factors, and the norm of what is lost as a share
        of the update's norm, from 0 to 1, over a stack as a whole.
    """
    outer, left_core = torch.linalg.qr(update.left)
    inner, right_core = torch.linalg.qr(update.right.mT)
    u, s, vh = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
    root = s[..., :rank].sqrt()
    total, lost = float(s.square().sum()), float(s[..., rank:].square().sum())
    kept = LowRank((outer @ u[..., :rank]) * root[..., None, :], root[..., :, None] * (vh[..., :rank, :] @ inner.mT))
    return kept, (lost / total) ** 0.5 if total > 0 else 0.0


def factor_matrix(matrix: Tensor) -> LowRank:
    """Return a matrix [..., out, in] as the product of itself and the identity, to be cut."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return LowRank(matrix, eye.expand(*matrix.shape[:-2], *eye.shape))


def merge_aligned(updates: Sequence[LowRank], merge: Callable[[list[Tensor]], Tensor]) -> LowRank:
    """Merge updates in their common basis (KnOTS): ``[Delta_1 ... Delta_K] = U S [V_1 ... V_K]^T``, then the V_k.

    The SVD is that of the core between the orthogonalised factors. Directions whose singular value is rounding alone
    are left out, by a bound relative to the largest.

    Args:
        updates: Of one matrix, in double precision; their ranks may differ.
        merge: Takes ``V_k^T`` [..., R, in] of every update, and returns one of this shape.

    Returns:
        ``U S V^T``, of rank R. Where ``merge`` is a weighted mean, that is the weighted mean of the updates.
    """
    outer, left_core = torch.linalg.qr(torch.cat([each.left for each in updates], dim=-1))
    inner, right_core = zip(*(torch.linalg.qr(each.right.mT) for each in updates), strict=True)
    parts = torch.split(left_core, [each.rank for each in updates], dim=-1)
    core = torch.cat([part @ one.mT for part, one in zip(parts, right_core, strict=True)], dim=-1)
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    s = torch.where(s > _ROUNDING * s.amax(dim=-1, keepdim=True), s, torch.zeros_like(s))
    blocks = torch.split(vh, [one.shape[-1] for one in inner], dim=-1)
    aligned = [block @ one.mT for block, one in zip(blocks, inner, strict=True)]
    return LowRank((outer @ u) * s[..., None, :], merge(aligned))
