"""Narrow convolutions in local training: the same function of the same weights, on channels that fill a register."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.core.gpu import has_hooks

# Kind of CPU -> float32 numbers in a register. Measured with AVX2: steps of LeNet-5 are 1.16 times faster. Not measured
# elsewhere.
REGISTERS = {"AVX2": 8}
# Layers that treat each channel by itself.
_CHANNELWISE = (nn.MaxPool2d, nn.AvgPool2d, nn.ReLU)


def widen(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the model's function, in which neighbouring convolutions exchange as many channels as fill a register.

    The kernels of convolutions and pooling treat a register of channels at a time. LeNet-5's six channels leave a
    quarter of it empty. Channels of zero weights fill it up: they are exactly zero, and so are their gradients.

    Args:
        model: Images [B, ch, H, W] -> outputs, on a CPU. It keeps its weights, which the returned function reads.

    Returns:
        A function with the model's outputs and gradients up to rounding. It is the model itself unless that is a
        ``Sequential`` without hooks, with a narrow convolution, and only pooling and ReLU until the next convolution.
        A hook before the model that it gets later is called.
    """
    register = REGISTERS.get(torch.backends.cpu.get_cpu_capability(), 0)
    layers = list(model) if type(model) is nn.Sequential and not has_hooks(model) else []
    read, made = Counter[int](), Counter[int]()  # channels to add, by the place of the layer
    for place, following, channels in _neighbours(layers):
        if channels < register:
            made[place] = read[following] = register - channels
    if not made:
        return model
    wide = nn.Sequential(
        *(
            _Widened(layer, read[place], made[place]) if _is_plain(layer) and read[place] + made[place] else layer
            for place, layer in enumerate(layers)
        )
    )
    wide._forward_pre_hooks = model._forward_pre_hooks  # training settles the layout of images by one
    return wide


def _neighbours(layers: Sequence[nn.Module]) -> Iterator[tuple[int, int, int]]:
    """Yield the places of two convolutions whose channels nothing between them mixes, and the number of channels."""
    last: tuple[int, nn.Conv2d] | None = None
    for place, layer in enumerate(layers):
        if _is_plain(layer):
            if last is not None:
                yield last[0], place, last[1].out_channels
            last = place, layer
        elif not isinstance(layer, _CHANNELWISE):
            last = None


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"


class _Widened(nn.Module):
    """A convolution with channels of zeros at the end of its input and of its output."""

    def __init__(self, layer: nn.Conv2d, read: int, made: int) -> None:
        super().__init__()
        self.layer, self.read, self.made = layer, read, made

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer
        weight = F.pad(own.weight, (0, 0, 0, 0, 0, self.read, 0, self.made))
        bias = None if own.bias is None else F.pad(own.bias, (0, self.made))
        return F.conv2d(x, weight, bias, own.stride, own.padding, own.dilation)
