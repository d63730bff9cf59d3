"""VGG-11 with batch normalisation (Simonyan and Zisserman, ICLR 2015), as Co-Boosting (ICLR 2024) fits it to CIFAR."""

from __future__ import annotations

from torch import nn

from .layers import chain, he_normal_convolutions

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
