"""The faster form of a frozen net against the net itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fl_app.models.fused import fused, padded


class Same(nn.Conv2d):
    """A convolution that pads its input by a module, as the packaged net does."""

    def __init__(self, *shape: int, stride: int, groups: int, padding: tuple[int, int, int, int] | None) -> None:
        super().__init__(shape[0], shape[1], shape[2], stride=stride, groups=groups, bias=False)
        self.static_padding = nn.ZeroPad2d(padding) if padding else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.static_padding(x))


class Block(nn.Module):
    """A block of the packaged net, under its names."""

    def __init__(self) -> None:
        super().__init__()
        self._expand_conv, self._bn0 = Same(3, 8, 1, stride=1, groups=1, padding=None), nn.BatchNorm2d(8)
        self._depthwise_conv = Same(8, 8, 3, stride=2, groups=8, padding=(0, 1, 0, 1))
        self._bn1, self._swish = nn.BatchNorm2d(8), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        grown = self._swish(self._bn0(self._expand_conv(x)))
        found: Tensor = self._swish(self._bn1(self._depthwise_conv(grown)))
        return found


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, (1, 1, 1, 1)), (3, 2, (0, 1, 0, 1)), (5, 2, (1, 2, 1, 2)), (1, 1, None)]
)
def test_padded_convolution_equals_the_one_that_copies_its_input(
    kernel: int, stride: int, padding: tuple[int, int, int, int] | None
) -> None:
    conv = Same(4, 4, kernel, stride=stride, groups=4, padding=padding)
    images = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(padded(conv)(images), conv(images), rtol=0, atol=1e-6)


def test_fused_net_has_the_features_of_the_net_and_no_normalisation() -> None:
    net = Block()
    for norm in (net._bn0, net._bn1):
        norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    images = 4 * torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    fast = fused(copy.deepcopy(net.eval()))

    torch.testing.assert_close(fast(images), net(images), rtol=0, atol=1e-5)
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.ZeroPad2d) for layer in fast.modules())
