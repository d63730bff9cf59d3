"""Models of rows of features: that of Fed-Heart-Disease (FLamby, Ogier du Terrail et al., NeurIPS 2022), and an MLP.

They take rows as [B, F, 1, 1], the shape in which data sets and methods pass examples.
"""

from __future__ import annotations

import torch
from torch import nn

from .layers import chain


def logistic(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:  # noqa: ARG001  2, by the zoo's table
    """Build logistic regression for rows [B, F, 1, 1]; logits [B, 2], those of :class:`BesideZero`."""
    return chain(flatten=nn.Flatten(), fc=nn.Linear(input_shape[0], 1), pair=BesideZero())


def mlp(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build F-64-32-C with ReLU, of no paper, for rows [B, F, 1, 1]; logits [B, C]."""
    return chain(
        flatten=nn.Flatten(),
        fc1=nn.Linear(input_shape[0], 64),
        relu1=nn.ReLU(inplace=True),
        fc2=nn.Linear(64, 32),
        relu2=nn.ReLU(inplace=True),
        fc3=nn.Linear(32, num_classes),
    )


class BesideZero(nn.Module):
    """Maps the single logit z of two classes to the two logits (0, z).

    Their softmax is (1 - sigma(z), sigma(z)), so their cross-entropy is the binary cross-entropy of z. The second
    logit is the larger one where z > 0.
    """

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Map [B, 1] to [B, 2]."""
        return torch.cat([torch.zeros_like(z), z], dim=1)
