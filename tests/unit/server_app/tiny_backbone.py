"""Backbones for features.backbone: of random weights, tiny_backbone:make or other, and of rows, tiny_backbone:rows."""

import torch
from torch import nn

from fl_app.models.backbones import Backbone


def net() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 24, 5, stride=3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    with torch.no_grad():
        for value in layers.parameters():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(value))) * 0.3)
    return layers


def make() -> Backbone:
    return Backbone("tiny", 96, net, side=16, non_negative=True)


def rows() -> Backbone:
    return Backbone("rows as they are", 3, nn.Flatten, columns=3)


def other() -> Backbone:
    return Backbone("other", 64, lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), _Pairs()), side=8)


class _Pairs(nn.Module):
    """Products of neighbouring places."""

    def forward(self, flat):  # type: ignore[no-untyped-def]
        """Map [B, 48] to [B, 64]."""
        own = flat[:, :16] + 1.1
        return own[:, :, None].mul(own[:, None, :4]).flatten(1)
