"""Nets for mobile devices, as Co-Boosting (Dai et al., ICLR 2024) uses them: torchvision's, with torch's defaults.

MobileNetV3-small: Howard et al., Searching for MobileNetV3, ICCV 2019, Table 2.
ShuffleNetV2 1.0x: Ma et al., ShuffleNet V2, ECCV 2018, Table 5.
"""

from __future__ import annotations

from torch import nn

from ..vision import torchvision
from .layers import default_init


def mobilenet(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build MobileNetV3-small for images [B, ch, H, H]; logits [B, C]."""
    # torchvision tunes normalisation to ImageNet (momentum 0.01, eps 0.001); few local steps need torch's defaults.
    model: nn.Module = torchvision.models.mobilenet_v3_small(num_classes=num_classes, norm_layer=nn.BatchNorm2d)
    stem = nn.Conv2d(input_shape[0], 16, 3, stride=2, padding=1, bias=False)
    model.get_submodule("features.0").register_module("0", stem)
    return default_init(model)


def shufflenet(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build ShuffleNetV2 of width 1.0 for images [B, ch, H, H]; logits [B, C]."""
    model: nn.Module = torchvision.models.shufflenet_v2_x1_0(num_classes=num_classes)
    stem = nn.Conv2d(input_shape[0], 24, 3, stride=2, padding=1, bias=False)
    model.get_submodule("conv1").register_module("0", stem)
    return default_init(model)
