"""Backbones for features.backbone: of random weights, tiny_backbone:make, and of rows, tiny_backbone:rows."""

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
