"""Sums and sums of squares of every class: one diagonal Gaussian per class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureMoments:
    """Sums over N examples with features f in R^d and labels of C classes, in float64.

    Attributes:
        counts: n_c, examples per class [C].
        sums: S, the sum of features per class [C, d].
        squares: Q, the sum of squared features per class [C, d].
    """

    counts: Tensor
    sums: Tensor
    squares: Tensor

    @classmethod
    def zeros(cls, classes: int, features: int) -> FeatureMoments:
        """Return the moments of no example."""
        empty = torch.zeros(classes, features, dtype=torch.float64)
        return cls(torch.zeros(classes, dtype=torch.float64), empty, empty.clone())

    def include(self, rows: Tensor, labels: Tensor) -> None:
        """Add a batch in place: features [B, d] of any float type with labels [B], int64 from 0 to C - 1."""
        precise = rows.to(torch.float64)
        self.counts.add_(torch.bincount(labels, minlength=len(self.counts)))
        self.sums.index_add_(0, labels, precise)
        self.squares.index_add_(0, labels, precise.square())

    @property
    def means(self) -> Tensor:
        """The mean feature of every class [C, d]; zero for a class without examples."""
        return self.sums / self.counts.clamp_min(1.0)[:, None]

    @property
    def deviations(self) -> Tensor:
        """The sum of squared deviations from the class mean, ``Q - n mu^2`` [C, d]; zero for a class of one example."""
        return (self.squares - self.sums * self.means).clamp_min(0.0) * (self.counts > 1)[:, None]

    def variances(self, fallback: Tensor) -> Tensor:
        """Return the variance of every feature within its class, ``Q / n - mu^2`` [C, d].

        A class of one example has the mean variance of the client's other classes, weighted by their examples.

        Args:
            fallback: The variances [d] of a client without a class of two examples.
        """
        several = self.counts > 1
        mean = mean_variance([self]) if bool(several.any()) else fallback
        return torch.where(several[:, None], self.deviations / self.counts.clamp_min(1.0)[:, None], mean)


def mean_variance(clients: Iterable[FeatureMoments]) -> Tensor:
    """Return the variance of every feature within classes [d], over all clients' classes of at least two examples.

    It is zero if there is no such class.

    Args:
        clients: At least one.
    """
    deviations, examples = torch.zeros(1, dtype=torch.float64), 0.0
    for own in clients:
        deviations = deviations + own.deviations.sum(0)
        examples += float(own.counts[own.counts > 1].sum())
    return deviations / max(1.0, examples)


def moments_to_arrays(moments: FeatureMoments) -> dict[str, Tensor]:
    """Return moments as they travel: ``counts`` float64 [C], ``sums`` and ``squares`` float32 [C, d]."""
    return {
        "counts": moments.counts.clone(),
        "sums": moments.sums.to(torch.float32),
        "squares": moments.squares.to(torch.float32),
    }


def moments_from_arrays(arrays: Mapping[str, Tensor]) -> FeatureMoments:
    """Return the moments of an upload whose shapes have been checked.

    An upload without ``squares`` has spherical ones: all features have norm 1, so that the squares of a class sum to
    n_c.
    """
    counts, sums = arrays["counts"].to(torch.float64), arrays["sums"].to(torch.float64)
    squares = arrays.get("squares")
    if squares is None:
        means = sums / counts.clamp_min(1.0)[:, None]
        rest = (1.0 - means.square().sum(1)).clamp_min(0.0) / sums.shape[1]
        return FeatureMoments(counts, sums, counts[:, None] * (means.square() + rest[:, None]))
    return FeatureMoments(counts, sums, squares.to(torch.float64))
