"""The combiners of models of two classes, which read each member's log-odds of class 1, ``d = z_1 - z_0``.

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, the forms for Fed-Heart-Disease
and Camelyon16. The paper's models have one logit z, which here is (0, z); these combiners return logits (0, z) too.
:mod:`.forms` has the same forms in numpy, with the same tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trained import Linear, TwoLayers, register

# Replaces a share of zero in logarithms.
TINY = torch.finfo(torch.float32).tiny


class TwoClassMean(nn.Module):
    """``log(s_1 / s_0)``, ``s_c = (1/M) sum_i p_i(c)``: the mean of probabilities."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        return _odds(logits.log_softmax(2).logsumexp(0))


class TwoClassLabelCount(nn.Module):
    """``log(s_1 / s_0)``, ``s_c = sum_i lambda_i[c] p_i(c)``, ``lambda_i[c] = n_i^c / sum_j n_j^c``.

    A class that no client holds has a share of ``TINY``.

    Args:
        weights: n_i^c >= 0, the examples of class c that member i was trained on [M, 2].
    """

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        register(self, {"weights": (weights, 2)})

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        total = self.weights.sum(0)
        shares = (self.weights / torch.where(total > 0, total, torch.ones_like(total))).clamp(min=TINY)
        return _odds((shares.log()[:, None] + logits.log_softmax(2)).logsumexp(0))


class TwoClassLinear(Linear):
    """``sum_i w_i d_i + b``, the aggregator for Fed-Heart-Disease, with the tensors of :class:`.trained.Linear`."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        return _beside_zero(self.weight @ (logits[..., 1] - logits[..., 0]) + self.bias)


class TwoClassTwoLayers(TwoLayers):
    """``W2 sigmoid(W1 d + b1) + b2``, the aggregator for Camelyon16: W1 [8, M], b1 [8], W2 [1, 8], b2 [1]."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        d = (logits[..., 1] - logits[..., 0]).T
        hidden = F.linear(d, self.weight1, self.bias1).sigmoid()
        return _beside_zero(F.linear(hidden, self.weight2, self.bias2)[:, 0])


def _odds(log_s: Tensor) -> Tensor:
    return _beside_zero(log_s[:, 1] - log_s[:, 0])


def _beside_zero(z: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(z), z], dim=1)
