"""A backbone of one's own: frozen edge filters, whose mean responses over 4 x 4 pixels are the features."""

import torch
from oneshot_fl.fl_app.models.backbones import Backbone
from torch import nn

SIDE = 32


def net():
    sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 4
    laplace = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]) / 4
    filters = torch.stack([sobel, -sobel, sobel.T, -sobel.T, laplace, -laplace])
    edges = nn.Conv2d(3, len(filters), 3, padding=1, bias=False)
    with torch.no_grad():
        edges.weight.copy_(filters[:, None].expand(-1, 3, -1, -1) / 3)
    return nn.Sequential(edges, nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten()).eval()


def make():
    return Backbone("edges", 6 * 8 * 8, net, side=SIDE, non_negative=True)
