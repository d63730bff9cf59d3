"""Small nets of images and of rows.

Of images: the convolutional nets of DENSE (Zhang et al., NeurIPS 2022) and Co-Boosting (Dai et al., ICLR 2024). Of rows
[B, F, 1, 1]: that of Fed-Heart-Disease (FLamby, Ogier du Terrail et al., NeurIPS 2022), and an MLP.
"""

from __future__ import annotations

import torch
from torch import nn

from . import chain


def cnn5(
    num_classes: int, input_shape: tuple[int, int, int], widths: tuple[int, int, int] = (128, 128, 128)
) -> nn.Module:
    """Build "CNN5", also "CNN2" of DENSE and "CNN1" of Co-Boosting, for images [B, ch, H, H]; logits [B, C].

    The papers count three convolutions and two poolings as its five layers. DENSE's code is wider for CIFAR-100.
    """
    layers, size = _three_convolutions(input_shape, widths)
    return chain(**layers, fc=nn.Linear(size, num_classes))


def cnn1(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build "CNN1" of DENSE's heterogeneous clients for images [B, ch, H, H]; logits [B, C]."""
    layers, size = _three_convolutions(input_shape, widths=(32, 64, 64))
    return chain(**layers, fc1=nn.Linear(size, 64), relu4=nn.ReLU(inplace=True), fc2=nn.Linear(64, num_classes))


def _three_convolutions(
    input_shape: tuple[int, int, int], widths: tuple[int, int, int]
) -> tuple[dict[str, nn.Module], int]:
    """Return the common layers and the length of their output vector."""
    channels, side, _ = input_shape
    first, second, third = widths
    side = ((side - 2) // 2 - 2) // 2 - 2  # each 3x3 convolution removes 2 pixels, each pooling halves the side
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, first, 3),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(inplace=True),
        "conv2": nn.Conv2d(first, second, 3),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(inplace=True),
        "conv3": nn.Conv2d(second, third, 3),
        "relu3": nn.ReLU(inplace=True),
        "flatten": nn.Flatten(),
    }
    return layers, third * side * side


def mnist_cnn(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build the net of DENSE's code for MNIST and Fashion-MNIST, for images [B, ch, H, H]; logits [B, C]."""
    channels, side, _ = input_shape
    side //= 4  # padded convolutions keep the side, two poolings quarter it
    return chain(
        conv1=nn.Conv2d(channels, 16, 5, padding=2),
        bn1=nn.BatchNorm2d(16),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(inplace=True),
        conv2=nn.Conv2d(16, 32, 5, padding=2),
        bn2=nn.BatchNorm2d(32),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(inplace=True),
        flatten=nn.Flatten(),
        fc=nn.Linear(32 * side * side, num_classes),
    )


# LeNet-5 and its padding-free twin.
#
# LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 1998; in the form of Co-Boosting
# (Dai et al., ICLR 2024), with ReLU and max pooling.


def lenet5(num_classes: int, input_shape: tuple[int, int, int], *, padded: bool = True) -> nn.Module:
    """Build LeNet-5 for images [B, ch, H, H]; logits [B, C].

    From 32 pixels a side the convolutions are unpadded, as published. Below 32 the first one pads by 2, so 28 pixels
    give the net of 32. Below 28 the second one pads by 2 too, so that no map vanishes. Never padded it is "CNN2" of
    Co-Boosting, the net of PyTorch's tutorial.

    The published third layer, a 5x5 convolution of a 5x5 map, equals a linear map of that whole map to 120 numbers.
    Here it is ``fc1``, at every size. Co-Boosting calls these 120 numbers, the input of ``fc2``, the feature.
    """
    channels, side, _ = input_shape
    paddings = (2 * (side < 32), 2 * (side < 28)) if padded else (0, 0)
    for padding in paddings:
        side = (side + 2 * padding - 4) // 2  # a 5x5 convolution, then a pooling by 2
    return chain(
        conv1=nn.Conv2d(channels, 6, 5, padding=paddings[0]),
        # Pooling before the ReLU gives the same numbers for a quarter of the ReLU's work, here and in the other files.
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(inplace=True),
        conv2=nn.Conv2d(6, 16, 5, padding=paddings[1]),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(inplace=True),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * side * side, 120),
        relu3=nn.ReLU(inplace=True),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(inplace=True),
        fc3=nn.Linear(84, num_classes),
    )


def logistic(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:  # noqa: ARG001  2, by the zoo's table
    """Build logistic regression for rows [B, F, 1, 1]; logits [B, 2], those of :class:`BesideZero`."""
    return chain(flatten=nn.Flatten(), fc=nn.Linear(input_shape[0], 1), pair=BesideZero())


def mlp(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build F-64-32-C with ReLU, of no paper, for rows [B, F, 1, 1]; logits [B, C]."""
    return chain(
        flatten=nn.Flatten(),
        fc1=nn.Linear(input_shape[0], 64),
        relu1=nn.ReLU(inplace=True),
        fc2=nn.Linear(64, 32),
        relu2=nn.ReLU(inplace=True),
        fc3=nn.Linear(32, num_classes),
    )


class BesideZero(nn.Module):
    """Maps the single logit z of two classes to the two logits (0, z).

    Their softmax is (1 - sigma(z), sigma(z)), so their cross-entropy is the binary cross-entropy of z. The second
    logit is the larger one where z > 0.
    """

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Map [B, 1] to [B, 2]."""
        return torch.cat([torch.zeros_like(z), z], dim=1)
