"""Encoders whose features are summed and compared with common prototypes of the classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trained import register


class Prototypes(nn.Module):
    """``(h / ||h||) . P_c`` for the sum h of the members' features.

    FAFI (Zeng et al., ICML 2025), as its published code predicts: ``h(x) = sum_k w_k e_k(x) / sum_k w_k`` of the raw
    features e_k. With directions of noise, ``h(x) = sum_k a_k(x) w_k e_k(x)`` up to a factor that changes nothing, and
    ``a_k(x) = 1 - cos(e_k(x), d_k)``: a member counts more for a sample that it tells from noise.

    Args:
        prototypes: P [C, F].
        weights: w_k >= 0 [M], not all zero.
        noise: d_k [M, F], the mean direction of each member's features for noise; None for the plain sum.
        batch: One bool: whether members' batch normalisation uses the statistics of the batch that it sees, in place of
            those of training. Predictions then depend on the other samples of the batch.

    Raises:
        ValueError: The shapes do not match, or the weights are negative or all zero.
    """

    prototypes: Tensor
    weights: Tensor
    noise: Tensor | None
    batch: Tensor | None

    def __init__(
        self, prototypes: Tensor, weights: Tensor, noise: Tensor | None = None, batch: Tensor | None = None
    ) -> None:
        super().__init__()
        register(self, {"prototypes": (prototypes, 2), "weights": (weights, 1)})
        if not bool((self.weights >= 0).all()) or not float(self.weights.sum()) > 0:
            raise ValueError(f"weights per member are {self.weights.tolist()}: must be from 0, and not all zero")
        if noise is not None and noise.shape != (len(weights), prototypes.shape[1]):
            raise ValueError(f"directions of noise are {list(noise.shape)}: must be [M, F]")
        self.register_buffer("noise", None if noise is None else noise.detach().clone().float())
        self.register_buffer("batch", None if batch is None else batch.clone())

    @property
    def batch_statistics(self) -> bool:
        """Whether members are called with the statistics of their batch, see :class:`.ensemble.Ensemble`."""
        return self.batch is not None and bool(self.batch)

    def forward(self, outputs: Tensor) -> Tensor:
        """Combine member outputs [M, B, C + F], logits and then features, to logits [B, C]."""
        features = outputs[..., len(self.prototypes) :]
        weights = (self.weights / self.weights.sum())[:, None]
        if self.noise is not None:
            cosines = torch.einsum("mbf,mf->mb", F.normalize(features, dim=2), self.noise)
            weights = weights * (1 - cosines)
        fused = torch.einsum("mb,mbf->bf", weights.expand(features.shape[:2]), features)
        return F.normalize(fused, dim=1) @ self.prototypes.T
