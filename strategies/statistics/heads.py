"""Linear heads in closed form, from the sums over all clients alone.

Ridge: He et al., *AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models*, CVPR 2025, and
Fani et al., *Accelerating Heterogeneous Federated Learning with Closed-form Classifiers* (Fed3R), ICML 2024. AFL's
pairwise law of aggregation equals the sum of the clients' statistics; one solve replaces its K - 1 inversions.
LDA: Guan et al., *Capture Global Feature Statistics for One-Shot Federated Learning* (FedCGS), AAAI 2025, and Turazza
et al., GH-OFL, ICLR 2026.

Deviations: the ridge penalty spares the bias and is measured in units of the mean eigenvalue, so that one grid serves
every backbone, N and d. LDA takes the covariance within classes, as GH-OFL does; FedCGS takes the total one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .sums import Statistics

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

# Half decades; in units of the mean eigenvalue they span the needs of any backbone, N and d.
LAMBDAS = tuple(round(10.0 ** (k / 2), 10) for k in range(-8, 4))
SHRINKAGES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
# The least trace of the covariance, as a share of that of the Gram matrix.
LEAST_SCATTER = 1e-12
# The bias of a class without examples: no score comes near it, and float32 holds it.
NEVER = -1e30


@dataclass(frozen=True)
class Head:
    """A linear head: logits are ``weight f + bias``.

    Attributes:
        weight: [C, d] in float64.
        bias: [C] in float64.
    """

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [B, C] of features [B, d], in the type of the features."""
        return features @ self.weight.to(features).T + self.bias.to(features)


class Ridge:
    """Least squares on one-hot targets, for every penalty from one tridiagonal form.

    Minimises ``||F W + 1 b^T - Y||^2 + l ||W||^2`` with ``l = lambda tr(A) / d``. The solution is
    ``W = (A + l I)^-1 R``, ``b = n / N - W^T m`` with ``R = S^T - m n^T``. With ``A = Q T Q^T`` it is
    ``Q (T + l I)^-1 Q^T R``, a solve of d steps for each penalty, and Q is never formed: two fifths of the time of an
    eigendecomposition.

    Args:
        statistics: Over all clients; at least one example.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        scatter = statistics.scatter
        self._scale = float(torch.trace(scatter)) / statistics.features
        right = statistics.sums.T - torch.outer(statistics.mean, statistics.counts)
        from scipy.linalg import lapack  # takes every process of the app a fifth of a CPU second to import

        self._reflectors, self._diagonal, self._beside, self._factors, _ = lapack.dsytrd(scatter.numpy(), lower=1)
        self._rotated = self._times_q(right.numpy(), transposed=True)

    def head(self, penalty: float) -> Head:
        """Return the head for one lambda > 0, in units of the mean eigenvalue of A."""
        # Features that are constant over all examples leave no scatter: the head is then the class frequencies.
        solved = self._solve(penalty * self._scale) if self._scale > 0 else np.zeros_like(self._rotated)
        weight = torch.from_numpy(self._times_q(solved, transposed=False).T.copy())
        counts = self._statistics.counts
        return Head(weight, counts / self._statistics.examples - weight @ self._statistics.mean)

    def _solve(self, strength: float) -> Array:
        """Return ``(T + l I)^-1 Q^T R``, with eigenvalues of T below 0 taken for 0."""
        from scipy import linalg

        banded = np.stack((self._diagonal + strength, np.append(self._beside, 0.0)))[: len(self._diagonal)]
        try:
            solved: Array = linalg.solveh_banded(banded, self._rotated, lower=True)
        except np.linalg.LinAlgError:  # the sums were rounded to float32, and examples are few
            values, vectors = linalg.eigh_tridiagonal(self._diagonal, self._beside)
            solved = vectors @ ((vectors.T @ self._rotated) / (values.clip(min=0.0) + strength)[:, None])
        return solved

    def _times_q(self, columns: Array, *, transposed: bool) -> Array:
        """Return Q or its transpose times some columns [d, C]; Q leaves the first row as it is."""
        from scipy.linalg import lapack

        turned = np.array(columns)
        if len(turned) > 1:
            way, reflectors = ("T" if transposed else "N"), self._reflectors[1:, :-1]
            turned[1:] = lapack.dormqr("L", way, reflectors, self._factors, turned[1:], 64 * turned.shape[1])[0]
        return turned


def ridge_head(statistics: Statistics, penalty: float) -> Head:
    """Return the head of :class:`Ridge` for one lambda > 0, by a Cholesky decomposition, a sixth of the time."""
    scatter, counts = statistics.scatter, statistics.counts
    strength = penalty * float(torch.trace(scatter)) / statistics.features
    if strength <= 0:
        return Ridge(statistics).head(penalty)
    right = statistics.sums.T - torch.outer(statistics.mean, counts)
    try:
        weight = solve_ridge(scatter, right, strength).T
    except np.linalg.LinAlgError:  # the sums were rounded to float32, and examples are few
        return Ridge(statistics).head(penalty)
    return Head(weight, counts / statistics.examples - weight @ statistics.mean)


def solve_ridge(scatter: Tensor, right: Tensor, strength: float) -> Tensor:
    """Return ``(A + l I)^-1 R`` [d, C] for l > 0, by a Cholesky decomposition; A is changed in place.

    Raises:
        LinAlgError: Rounding has left A an eigenvalue below -l.
    """
    scatter.diagonal().add_(strength)
    factor, failed = torch.linalg.cholesky_ex(scatter)
    if failed:
        raise np.linalg.LinAlgError(
            "the features' scatter has a negative eigenvalue by rounding: needs a larger penalty"
        )
    return torch.cholesky_solve(right, factor)


def solve_regression(scatter: Tensor, right: Tensor, mean: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return W [m, d] and b [m] of the ridge regression ``y = W f + b``, where the bias is not penalised.

    Args:
        scatter: A [d, d], of the features around their mean, as a sum or a mean over examples; changed in place.
        right: R [d, m], of features and targets around their means, likewise.
        mean: Of the features, then of the targets [d + m].
        penalty: lambda, in units of A's mean eigenvalue. Without scatter W is 0, and b the targets' mean.

    Raises:
        LinAlgError: See :func:`solve_ridge`.
    """
    features, targets = mean[: len(scatter)], mean[len(scatter) :]
    strength = penalty * float(torch.trace(scatter)) / len(scatter)
    weight = solve_ridge(scatter, right, strength).T if strength > 0 else torch.zeros_like(right.T)
    return weight, targets - weight @ features


class Lda:
    """Linear discriminants with one covariance for all classes, for every shrinkage from one eigendecomposition.

    ``Sigma = S_w / (N - C)``, ``Sigma_a = (1 - a) Sigma + a tr(Sigma) / d I``, ``w_c = Sigma_a^-1 mu_c``,
    ``b_c = log pi_c - mu_c^T w_c / 2``. C counts the classes with examples; the others are never predicted. Where
    examples have weights N - C is :attr:`~.sums.Statistics.freedom`, so that Sigma has no bias.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        covariance = statistics.scatter_within / max(1.0, statistics.freedom)
        self._values, self._vectors = torch.linalg.eigh(covariance)
        # Without scatter within the classes, as of one example each, rounding leaves 0 or less, which has no inverse.
        least = LEAST_SCATTER * float(torch.trace(statistics.gram))
        self._mean_value = max(float(torch.trace(covariance)), least) / statistics.features
        self._rotated = statistics.class_means @ self._vectors

    def spectrum(self, shrinkage: float) -> Tensor:
        """Return the eigenvalues of Sigma_a [d], for a shrinkage a in (0, 1]."""
        shrunk: Tensor = (1.0 - shrinkage) * self._values.clamp_min(0.0) + shrinkage * self._mean_value
        return shrunk

    def head(self, shrinkage: float, *, prior: str = "counts") -> Head:
        """Return the head for one shrinkage.

        Args:
            shrinkage: a in (0, 1].
            prior: ``"counts"`` for class frequencies, or ``"uniform"``.
        """
        rotated = self._rotated / self.spectrum(shrinkage)
        squares = (rotated * self._rotated).sum(1)
        counts = self._statistics.counts
        logs = torch.zeros_like(counts) if prior == "uniform" else (counts / counts.sum()).clamp_min(1e-300).log()
        bias = torch.where(self._statistics.seen, logs - squares / 2, torch.full_like(counts, NEVER))
        return Head(rotated @ self._vectors.T, bias)

    def log_likelihood(self, held_out: Statistics, shrinkage: float) -> float:
        """Return the log-likelihood of other examples, ``sum_i log pi_y N(f_i; mu_y, Sigma_a)``, from their sums.

        A class without examples here has the mean of all features and the prior of one example.
        """
        counts, own = held_out.counts, self._statistics
        prior = own.counts.clamp_min(1.0) / own.counts.clamp_min(1.0).sum()
        values = self.spectrum(shrinkage)
        gram = ((self._vectors.T @ held_out.gram) * self._vectors.T).sum(1)  # the diagonal in the eigenbasis
        cross = (self._rotated * (held_out.sums @ self._vectors)).sum(0)
        squares = (counts[:, None] * self._rotated.square()).sum(0)
        quadratic = ((gram - 2.0 * cross + squares) / values).sum()
        normaliser = held_out.examples * (held_out.features * math.log(2.0 * math.pi) + values.log().sum())
        return float((counts * prior.log()).sum() - (quadratic + normaliser) / 2.0)


def squared_error(head: Head, statistics: Statistics) -> float:
    """Return ``sum_i ||W^T f_i + b - y_i||^2`` over the examples of some statistics, without seeing one.

    Equals ``tr(W^T G W) + 2 b^T W^T s + N b^T b - 2 tr(S W) - 2 b^T n + N``, for one-hot targets have unit norm.
    """
    weight, bias = head.weight, head.bias
    total = statistics.sums.sum(0)
    quadratic = ((weight @ statistics.gram) * weight).sum() + 2.0 * bias @ (weight @ total)
    constant = statistics.examples * (bias @ bias + 1.0)
    return float(quadratic + constant - 2.0 * (statistics.sums * weight).sum() - 2.0 * bias @ statistics.counts)


def balance_classes(head: Head, counts: Tensor) -> Head:
    """Return a ridge head for a test with equally frequent classes.

    Every score is standardised by its target's mean and deviation over the training examples,
    ``(score - pi_c) / sqrt(pi_c (1 - pi_c))``, which equals a regression on standardised targets.

    Args:
        head: Of :class:`Ridge`.
        counts: n_c [C]; a class without examples is never predicted.
    """
    share = counts / counts.sum()
    spread = (share * (1.0 - share)).sqrt()
    known = spread > 0
    scale = torch.where(known, spread, torch.ones_like(spread))
    bias = torch.where(counts > 0, (head.bias - share) / scale, torch.full_like(share, NEVER))
    return Head(head.weight / scale[:, None], bias)


def fallback_penalties(statistics: Statistics) -> tuple[float, float]:
    """Return lambda = d / N and a = d / (d + N), for the case that no client can be left out."""
    features, examples = statistics.features, statistics.examples
    return features / examples, features / (features + examples)
