"""Nets for mobile devices, as Co-Boosting (Dai et al., ICLR 2024) uses them: torchvision's, with torch's defaults.

MobileNetV3-small: Howard et al., Searching for MobileNetV3, ICCV 2019, Table 2.
ShuffleNetV2 1.0x: Ma et al., ShuffleNet V2, ECCV 2018, Table 5.
"""

from __future__ import annotations

from torch import nn

from ..vision import torchvision
from .layers import chain, default_init, he_normal_convolutions


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


# VGG-11 with batch normalisation (Simonyan and Zisserman, ICLR 2015), as Co-Boosting (ICLR 2024) fits it to CIFAR.


_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def vgg11(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build VGG-11 for images [B, ch, H, H]; logits [B, C].

    One linear layer replaces the three of ImageNet. The pooling after the fifth block is left out, and so is the one
    after the fourth for images of less than 64 pixels a side.
    """
    channels, side, _ = input_shape
    layers: list[nn.Module] = []
    for index, widths in enumerate(_BLOCKS):
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        pools = index < 3 or (index == 3 and side >= 64)
        # The identity keeps the names of later layers, which are torchvision's, the same at every size.
        layers.insert(-1, nn.MaxPool2d(2) if pools else nn.Identity())
    features = he_normal_convolutions(nn.Sequential(*layers))
    classifier = nn.Linear(channels, num_classes)
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    return chain(features=features, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), classifier=classifier)
