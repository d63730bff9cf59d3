"""One full Gaussian per class, sent by every client and pooled: counts, means and covariances of features.

CCVR (Luo, Chen, Hu, Zhang, Liang, Feng, No Fear of Heterogeneity, NeurIPS 2021, https://arxiv.org/abs/2106.05001).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import refusals
from .bounds import ROUNDING

LARGEST = 1e9  # of a mean or a variance: draws, and steps of a classifier on them, stay finite in float32


@dataclass(frozen=True)
class Gaussians:
    """A Gaussian per class of features in R^F.

    Attributes:
        counts: n_c, int64 [C].
        means: mu_c [C, F]; 0 for a class without examples.
        covariances: S_c, with n_c - 1 in the denominator [C, F, F]; 0 for fewer than two examples.
    """

    counts: Tensor
    means: Tensor
    covariances: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, classes: int) -> Gaussians:
        """Return those of features [N, F] with labels [N], int64 from 0 to C - 1, in float64."""
        rows = features.double()
        means = rows.new_zeros(classes, rows.shape[1])
        covariances = rows.new_zeros(classes, rows.shape[1], rows.shape[1])
        for c in torch.unique(labels).tolist():
            own = rows[labels == c]
            means[c] = own.mean(0)
            if len(own) > 1:
                covariances[c] = torch.cov(own.T)
        return cls(torch.bincount(labels, minlength=classes), means, covariances)

    def check(self, most: int) -> None:
        """Refuse what no examples' features have, as one client may send it.

        Raises:
            UploadError: Counts, means or covariances break a bound.
        """
        if int(self.counts.min()) < 0 or not 0 < float(self.counts.double().sum()) <= most:
            raise refusals.broken_rule(f"counts are {self.counts.tolist()!s:.80}", f"from 0, with a sum of 1 to {most}")
        means, spread = self.means.double(), self.covariances.double()
        variances = spread.diagonal(dim1=1, dim2=2)
        if not max(float(means.abs().max()), float(variances.abs().max())) <= LARGEST:
            raise refusals.broken_rule(f"means or variances exceed {LARGEST:g}", "at most that large")
        if bool(spread[self.counts < 2].any() or means[self.counts < 1].any()):
            raise refusals.broken_rule("covariances of less than two examples, or means of none, are not 0", "0")
        # |S_ij| <= sqrt(S_ii S_jj) bounds the other entries too.
        slack = ROUNDING * variances.amax(1)[:, None, None] + torch.finfo(torch.float32).tiny
        roots = variances.clamp(min=0).sqrt()
        over = (spread.abs() - roots[:, :, None] * roots[:, None] > slack) | ((spread - spread.mT).abs() > slack)
        if bool((variances < 0).any() or over.any()):
            raise refusals.broken_rule(
                "covariances are not those of features",
                "symmetric, with variances from 0, and no entry above the root of the product of its variances",
            )

    @classmethod
    def pooled(cls, parts: list[Gaussians]) -> Gaussians:
        """Return those of all clients' examples together, in float64.

        With N = sum_k n_k and mu the mean of all examples of a class, its covariance is
        ``[sum_k (n_k - 1) S_k + sum_k n_k mu_k mu_k^T - N mu mu^T] / (N - 1)``.
        Here the last two terms are one sum of differences from mu, which loses no digits.
        """
        counts = torch.stack([part.counts for part in parts])  # [M, C]
        weights, total = counts.double(), counts.sum(0)
        own = torch.stack([part.means for part in parts]).double()
        means = torch.einsum("mc,mcf->cf", weights, own) / total.clamp(min=1)[:, None]
        within = torch.einsum(
            "mc,mcfg->cfg", (weights - 1).clamp(min=0), torch.stack([part.covariances for part in parts]).double()
        )
        apart = own - means
        between = torch.einsum("mc,mcf,mcg->cfg", weights, apart, apart)
        return cls(total, means, (within + between) / (total - 1).clamp(min=1)[:, None, None])

    def draw(self, c: int, count: int, rng: torch.Generator) -> Tensor:
        """Return features of a class [count, F] in float32, also where its covariance is singular."""
        values, vectors = torch.linalg.eigh(self.covariances[c].double())
        # Of all square roots the symmetric one does not depend on the choice of eigenvectors.
        root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        noise = torch.randn(count, len(root), generator=rng, dtype=torch.float64)
        drawn: Tensor = self.means[c].double() + noise @ root
        return drawn.float()
