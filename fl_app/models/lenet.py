"""LeNet-5 and its padding-free twin.

LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 1998; in the form of Co-Boosting
(Dai et al., ICLR 2024), with ReLU and max pooling.
"""

from __future__ import annotations

from torch import nn

from .layers import chain


def lenet5(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build LeNet-5 for images [B, ch, H, H]; logits [B, C].

    From 32 pixels a side the convolutions are unpadded, as published. Below 32 the first one pads by 2, so 28 pixels
    give the net of 32. Below 28 the second one pads by 2 too, so that no map vanishes.

    The published third layer, a 5x5 convolution of a 5x5 map, equals a linear map of that whole map to 120 numbers.
    Here it is ``fc1``, at every size. Co-Boosting calls these 120 numbers, the input of ``fc2``, the feature.
    """
    side = input_shape[1]
    return _two_convolutions(num_classes, input_shape, paddings=(2 * (side < 32), 2 * (side < 28)))


def cnn_torch(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build "CNN2" of Co-Boosting, the net of PyTorch's tutorial, for images [B, ch, H, H]; logits [B, C]."""
    return _two_convolutions(num_classes, input_shape, paddings=(0, 0))


def _two_convolutions(num_classes: int, input_shape: tuple[int, int, int], paddings: tuple[int, int]) -> nn.Module:
    channels, side, _ = input_shape
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
