"""Differential privacy of feature sums: one Gaussian on all of them, with the exact calibration.

Balle and Wang, *Improving the Gaussian Mechanism for Differential Privacy*, ICML 2018, theorem 8,
https://arxiv.org/abs/1805.06530. The unit of privacy is one example of a client, added or removed.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..core.seeds import system_normal
from .sums import Statistics

# Sums carry the classes and have few entries, counts are large: these weights spend the budget where it helps.
SUM_WEIGHT, COUNT_WEIGHT = 2.0, 0.1
# Norms must not exceed 1 in the last bit either.
MARGIN = 1e-6
# Bits of a noisy sum below its noise. Further ones would tell the exact sum, because noise leads from each sum to some
# floating-point numbers only (Mironov, On Significance of the Least Significant Bits for Differential Privacy, 2012).
GRID_BITS = 20


def sensitivity() -> float:
    """Return the L2 norm of the contribution of one example of unit norm to (G, 2 S, 0.1 n): sqrt(1 + 2^2 + 0.1^2)."""
    return math.sqrt(1.0 + SUM_WEIGHT**2 + COUNT_WEIGHT**2)


def log_delta(epsilon: float, noise: float) -> float:
    """Return the logarithm of the least delta of a Gaussian mechanism of sensitivity 1.

    ``delta = Phi(1 / 2s - eps s) - e^eps Phi(-1 / 2s - eps s)``, computed in log space.

    Args:
        epsilon: At least 0.
        noise: s, the standard deviation of the noise, greater than 0.
    """
    first, second = (
        float(torch.special.log_ndtr(torch.tensor(sign / (2.0 * noise) - epsilon * noise, dtype=torch.float64)))
        for sign in (1.0, -1.0)
    )
    gap = epsilon + second - first
    return -math.inf if gap >= 0.0 else first + math.log1p(-math.exp(gap))


@functools.cache
def noise_for(epsilon: float, delta: float) -> float:
    """Return the least noise for a budget at sensitivity 1, by bisection to 1e-12 relative.

    Args:
        epsilon: Greater than 0.
        delta: Between 0 and 1.

    Raises:
        ValueError: The budget is out of its range.
    """
    if not (epsilon > 0.0 and 0.0 < delta < 1.0):
        raise ValueError(f"epsilon is {epsilon} and delta {delta}: must be greater than 0, and delta less than 1")
    low, high = 1e-6, 1e-6
    while log_delta(epsilon, high) > math.log(delta):
        low, high = high, 2.0 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if log_delta(epsilon, middle) > math.log(delta) else (low, middle)
    return high


def noise_std(epsilon: float, delta: float) -> float:
    """Return sigma, the deviation of the noise on the diagonal of G, for a budget; 0 for epsilon 0, without noise."""
    return noise_for(epsilon, delta) * sensitivity() if epsilon else 0.0


def spent_epsilon(mechanisms: list[float], delta: float) -> float:
    """Return the epsilon of several Gaussian mechanisms on the same examples.

    They compose exactly: ``mu = sqrt(sum mu_i^2)`` with ``mu_i = D / sigma_i``.

    Args:
        mechanisms: mu_i of each; empty costs nothing.
        delta: Between 0 and 1.
    """
    mu = math.sqrt(sum(value**2 for value in mechanisms))
    if mu == 0.0 or log_delta(0.0, 1.0 / mu) <= math.log(delta):
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(high, 1.0 / mu) > math.log(delta):
        low, high = high, 2.0 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if log_delta(middle, 1.0 / mu) > math.log(delta) else (low, middle)
    return high


def normalize_features(features: Tensor) -> Tensor:
    """Return features [B, d] with norms just below 1, in float64; a zero row stays zero."""
    precise = features.to(torch.float64)
    norms = precise.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, precise / (norms.clamp_min(1e-300) * (1.0 + MARGIN)), precise)


def release_sums(statistics: Statistics, epsilon: float, delta: float) -> Statistics:
    """Return noisy statistics that keep a budget, for features of norm at most 1.

    Off-diagonal entries of G stand twice in its Frobenius norm, so their noise has half the variance of the diagonal.
    The noise comes from the operating system's entropy and never from a seed. Its sum with the exact number is
    rounded to :data:`GRID_BITS` bits below the noise.

    Args:
        epsilon: Greater than 0.
        delta: Between 0 and 1.
    """
    scale = noise_std(epsilon, delta)
    step = 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)

    def draw(like: Tensor, factor: float) -> Tensor:
        return system_normal(*like.shape) * (scale * factor)

    def rounded(noisy: Tensor) -> Tensor:
        return (noisy / step).round_() * step

    noise = draw(statistics.gram, math.sqrt(0.5))
    upper = torch.triu(noise, 1)
    symmetric = upper + upper.T + torch.diag(noise.diagonal() * math.sqrt(2.0))
    return Statistics(
        rounded(statistics.counts + draw(statistics.counts, 1.0 / COUNT_WEIGHT)),
        rounded(statistics.sums + draw(statistics.sums, 1.0 / SUM_WEIGHT)),
        rounded(statistics.gram + symmetric),
    )
