"""Wide residual nets of widening factor 1 (Zagoruyko and Komodakis, BMVC 2016), clients of DENSE (NeurIPS 2022)."""

from __future__ import annotations

import torch
from torch import nn

from .layers import chain, he_normal_convolutions


def wrn16_1(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build WRN-16-1 for images [B, ch, H, H]; logits [B, C]."""
    return _wide_resnet(num_classes, input_shape[0], depth=16)


def wrn40_1(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build WRN-40-1 for images [B, ch, H, H]; logits [B, C]."""
    return _wide_resnet(num_classes, input_shape[0], depth=40)


def _wide_resnet(num_classes: int, channels: int, depth: int) -> nn.Module:
    blocks = (depth - 4) // 6  # per group, of two convolutions each; the 4 counts the stem and the shortcuts
    model = chain(
        conv1=nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        group1=_group(16, 16, stride=1, blocks=blocks),
        group2=_group(16, 32, stride=2, blocks=blocks),
        group3=_group(32, 64, stride=2, blocks=blocks),
        bn=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(64, num_classes),
    )
    return he_normal_convolutions(model)


def _group(width_in: int, width_out: int, *, stride: int, blocks: int) -> nn.Sequential:
    rest = (PreActivationBlock(width_out, width_out) for _ in range(blocks - 1))
    return nn.Sequential(PreActivationBlock(width_in, width_out, stride), *rest)


class PreActivationBlock(nn.Module):
    """A residual block that normalises before each convolution.

    He et al., Identity Mappings in Deep Residual Networks, ECCV 2016, Fig. 1(b). Where the width changes, the
    shortcut is a 1x1 convolution of the normalised input, as in the code of the wide residual nets.
    """

    def __init__(self, width_in: int, width_out: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.shortcut = None if width_in == width_out else nn.Conv2d(width_in, width_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, in, H, W] to [B, out, H / stride, W / stride]."""
        h = torch.relu(self.bn1(x))
        residual: torch.Tensor = self.conv2(torch.relu(self.bn2(self.conv1(h))))
        return residual + (x if self.shortcut is None else self.shortcut(h))
