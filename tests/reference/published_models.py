"""The papers' two client models as they are published: ReLU before pooling, LeNet-5 with its third convolution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def plain_cnn5(classes: int = 10) -> nn.Module:
    """CNN5 for images [B, 3, 32, 32]: three convolutions of 128 channels and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 128, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 128, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 128, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(2048, classes),
    )  # fmt: skip


def plain_lenet5(classes: int = 10) -> nn.Module:
    """LeNet-5 for images [B, 1, 32, 32]."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 5), nn.ReLU(),
        nn.Flatten(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


def load_in_order(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Give a model the tensors of another of the same layers, one after the other; only shapes may differ.

    Returns:
        The model.
    """
    with torch.no_grad():
        for own, other in zip(_tensors(model), state.values(), strict=True):
            own.copy_(other.reshape(own.shape))
    return model


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return iter(model.state_dict().values())
