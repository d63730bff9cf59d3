"""A backbone of random weights, for features.backbone=tiny_backbone:make."""

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
