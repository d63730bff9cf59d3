"""The ridge head of sums with noise, whose penalty follows from the noise alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .heads import Head
from .sums import Statistics


def noisy_head(total: Statistics, noises: Sequence[float]) -> Head:
    """Return the head of noisy sums: all of it is post-processing, which spends no privacy.

    Negative eigenvalues of G become 0. The penalty ``l = sqrt(2 d sum_k sigma_k^2)`` is the edge of the noise's
    spectrum, because off-diagonal entries of G have the deviation ``sigma_k / sqrt(2)``. There is no bias: features of
    norm 1 that are not centred carry one.

    Args:
        total: The sum of the clients' statistics.
        noises: sigma_k of every client, the deviation on the diagonal of G.
    """
    edge = math.sqrt(2.0 * total.features * sum(noise**2 for noise in noises))
    values, vectors = torch.linalg.eigh(total.gram)
    weight = vectors @ ((vectors.T @ total.sums.T) / (values.clamp_min(0.0) + edge)[:, None])
    return Head(weight.T.contiguous(), torch.zeros(total.classes, dtype=torch.float64))
