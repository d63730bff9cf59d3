"""The nets that are built from torchvision's: residual nets, nets for mobile devices, and VGG-11.

Residual nets: He et al., Deep Residual Learning for Image Recognition, CVPR 2016.

- CIFAR form: a 3x3 stem of stride 1, no max pooling (DENSE, Co-Boosting);
- narrow CIFAR form: a third of the width (FuseFL, Tang et al., NeurIPS 2024);
- ImageNet form: torchvision's own, "without modification" (FLBoost = FedFTG, Zhang et al., CVPR 2022);
- ResNet-8: three blocks (FENS, Allouah et al., NeurIPS 2024).

Nets for mobile devices, as Co-Boosting (Dai et al., ICLR 2024) uses them, with torch's defaults:

- MobileNetV3-small: Howard et al., Searching for MobileNetV3, ICCV 2019, Table 2;
- ShuffleNetV2 1.0x: Ma et al., ShuffleNet V2, ECCV 2018, Table 5.
"""

from __future__ import annotations

import torch
from torch import nn

from strategies.core.vision import torchvision

from . import chain


def resnet(num_classes: int, input_shape: tuple[int, int, int], *, depth: int, imagenet: bool = False) -> nn.Module:
    """Build ResNet-18 or ResNet-34 for images [B, ch, H, H]; logits [B, C].

    Args:
        input_shape: (ch, H, H).
        depth: 18 or 34.
        imagenet: torchvision's own form and initialisation; else the CIFAR form, initialised as torch does.
    """
    model: nn.Module = getattr(torchvision.models, f"resnet{depth}")(num_classes=num_classes)
    channels = input_shape[0]
    if not imagenet:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        return default_init(model)
    if channels != 3:
        stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        model.conv1 = he_normal_convolutions(stem)
    return model


def resnet18_narrow(num_classes: int, input_shape: tuple[int, int, int], width: int = 20) -> nn.Module:
    """Build ResNet-18 in its CIFAR form, ``width`` channels in place of 64, for images [B, ch, H, H]; logits [B, C].

    FuseFL has 20 for its five clients, which then have half of ResNet-18's weights together.
    """
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    layers = {
        f"layer{n}": nn.Sequential(
            _block(widths[n - 1], widths[n], stride=1 if n == 1 else 2), _block(widths[n], widths[n], stride=1)
        )
        for n in range(1, 5)
    }
    return chain(
        conv1=nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        **layers,
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(8 * width, num_classes),
    )


def resnet8(
    num_classes: int, input_shape: tuple[int, int, int], widths: tuple[int, int, int] = (128, 256, 512)
) -> nn.Module:
    """Build ResNet-8 for images [B, ch, H, H]; logits [B, C].

    The widths of the downsized ResNet-8 of FENS, Table 4, are unpublished; 28, 56 and 112 give 0.92 MiB where the paper
    says 0.88 to 0.90.
    """
    channels = input_shape[0]
    first, second, third = widths
    return chain(
        conv1=nn.Conv2d(channels, first, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(first),
        relu=nn.ReLU(inplace=True),
        layer1=_block(first, first, stride=1),
        layer2=_block(first, second, stride=2),
        layer3=_block(second, third, stride=2),
        # Equal to the published pooling by 4 at 32 pixels a side; its output is 2x2 at every size.
        avgpool=nn.AdaptiveAvgPool2d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(4 * third, num_classes),
    )


def _block(width_in: int, width_out: int, stride: int) -> nn.Module:
    """Return a basic block; where the shape changes, its shortcut is a 1x1 convolution with normalisation."""
    shortcut = None
    if stride != 1 or width_in != width_out:
        shortcut = nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out))
    block: nn.Module = torchvision.models.resnet.BasicBlock(width_in, width_out, stride, shortcut)
    return block


# Wide residual nets of widening factor 1 (Zagoruyko and Komodakis, BMVC 2016), clients of DENSE (NeurIPS 2022).


def wide_resnet(num_classes: int, input_shape: tuple[int, int, int], *, depth: int) -> nn.Module:
    """Build WRN-16-1 or WRN-40-1 for images [B, ch, H, H]; logits [B, C]."""
    channels = input_shape[0]
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


def default_init(model: nn.Module) -> nn.Module:
    """Draw every parameter again from torch's default law, in place, and return the model.

    It replaces the initialisation of torchvision's models.
    """
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def he_normal_convolutions(model: nn.Module) -> nn.Module:
    """Draw every convolution from N(0, 2 / (k * k * out)), biases 0, in place, and return the model.

    He et al., Delving Deep into Rectifiers, ICCV 2015, Eq. (14): the variance that keeps the gradients' size.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
