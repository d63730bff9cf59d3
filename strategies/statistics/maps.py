"""A fixed random map of features: a nonlinear head in one round, as exactly invariant as a linear one.

Sums over mapped features add up as those over the features themselves, for the map is the same everywhere and sees no
data. Sources: Rahimi, Recht, Random Features for Large-Scale Kernel Machines, NIPS 2007; Fani et al., Fed3R, ICML 2024,
whose variant RF is of this kind. Here the map is a layer of rectified linear units with Gaussian weights and biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.seeds import derive_seed


@dataclass(frozen=True)
class ReluMap:
    """``relu(B^T f + c)`` of features f of norm 1, for which ``B^T f`` has the deviation 1.

    Attributes:
        weight: B [d, D], standard normal, float64.
        bias: c [D], standard normal, float64.
    """

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, features: int, width: int, seed: int) -> ReluMap:
        """Draw a map by numpy's PCG64, the same for a seed on every machine.

        Args:
            features: d.
            width: D.
            seed: Of the run.
        """
        rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "features", "map")))
        weight, bias = rng.standard_normal((features, width)), rng.standard_normal(width)
        return cls(torch.from_numpy(weight), torch.from_numpy(bias))

    def __call__(self, features: Tensor) -> Tensor:
        """Map features [B, d] to [B, D] in float64; an example without features, of norm 0, stays without."""
        known = (features != 0).any(1, keepdim=True)
        return torch.addmm(self.bias, features.to(torch.float64), self.weight).relu_() * known
