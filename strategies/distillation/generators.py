"""Generators: noise [B, Z] to pixels in [0, 1]; noise and labels to normalised images, or to features."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.layout import fast_layout

# Channels of both generators of images, half as many before the pixels.
WIDTH = 128
GENERATOR_FORMS = ("published-code", "paper")  # of FLBoost's, where the two differ


class UpsampleConv(nn.Module):
    """Nearest upsampling by two, then a 3x3 convolution with padding 1 and no bias, in one step.

    Equal to one 4x4 transposed convolution of stride 2: along one axis ``out[2i] = w0 x[i-1] + (w1 + w2) x[i]`` and
    ``out[2i+1] = (w0 + w1) x[i] + w2 x[i+1]``. It needs 4/9 of the arithmetic and never builds the large image.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, 2H, 2W]."""
        # The rows and columns stand first, so that the spread kernel is channels-last in memory without a copy.
        kernel = _spread(_spread(self.weight.permute(2, 3, 1, 0), 0), 1).permute(2, 3, 0, 1)
        return F.conv_transpose2d(x, kernel.contiguous(memory_format=torch.channels_last), stride=2, padding=1)


def _spread(weight: Tensor, axis: int) -> Tensor:
    """Turn the taps (w0, w1, w2) of an axis into those of the transposed convolution."""
    w0, w1, w2 = weight.unbind(axis)
    return torch.stack([w2, w1 + w2, w0 + w1, w0], axis)


class PixelConv(nn.Conv2d):
    """A 3x3 convolution with padding 1 to the few channels of an image.

    Convolution kernels of a CPU work on eight or sixteen channels at a time, and leave most of that empty here. There
    it is a matrix product, of every pixel with every tap, and the sum of the shifted products: twice as fast for one
    channel, with the backward pass.
    """

    bias: Tensor

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__(inputs, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, channels, H, W]."""
        if x.device.type != "cpu":
            return super().forward(x)
        # A tap reads the pixel on its own side, so that its product moves to the other one.
        taps = self.weight.flip(2, 3).permute(0, 2, 3, 1).flatten(0, 2)
        products = (taps @ x.flatten(2)).to(self.weight.dtype)
        image = F.fold(products, x.shape[2:], 3, padding=1).contiguous(memory_format=torch.channels_last)
        return image + self.bias[:, None, None]


class DenseGenerator(nn.Module):
    """The generator of DENSE and Co-Boosting: that of DAFL with a sigmoid at its end.

    Linear(Z -> 128 H/4 W/4), BN; twice [upsample x2, 3x3 convolution, BN, leaky ReLU 0.2] with 128, then 64 channels;
    3x3 convolution; sigmoid. It has 2,328,899 parameters at Z = 256 and 3x32x32.

    Args:
        latent: Z.
        image_shape: (channels, height, width); height and width are multiples of 4.

    Raises:
        OptionError: The height or the width is not a multiple of 4.
    """

    def __init__(self, latent: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels = image_shape[0]
        height, width = _quarter(image_shape)
        self.first = (WIDTH, height, width)
        self.project = nn.Linear(latent, WIDTH * height * width)
        self.norm0 = nn.BatchNorm2d(WIDTH)
        self.up1, self.norm1 = UpsampleConv(WIDTH, WIDTH), nn.BatchNorm2d(WIDTH)
        self.up2, self.norm2 = UpsampleConv(WIDTH, WIDTH // 2), nn.BatchNorm2d(WIDTH // 2)
        self.pixels = PixelConv(WIDTH // 2, channels)
        fast_layout(self)

    def forward(self, noise: Tensor) -> Tensor:
        """Map noise [B, Z] to pixels [B, channels, height, width] in [0, 1]."""
        x = self.project(noise).view(-1, *self.first)
        x = self.norm0(x.contiguous(memory_format=torch.channels_last))
        x = F.leaky_relu(self.norm1(self.up1(x)), 0.2, inplace=True)
        x = F.leaky_relu(self.norm2(self.up2(x)), 0.2, inplace=True)
        return torch.sigmoid(self.pixels(x))

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        """Redraw all weights, N(0, 0.02), and normalisation scales, N(1, 0.02); reset biases and running statistics.

        Args:
            rng: A CPU generator; equal states give equal weights on every device.
        """
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                centre = 1.0 if name.startswith("norm") else 0.0
                parameter.copy_(centre + 0.02 * torch.randn(parameter.shape, generator=rng))


class ConditionalGenerator(nn.Module):
    """The generator of FLBoost: noise and labels to *normalised* images, which the models take directly.

    Zhang, Shen, Ding, Tao, Duan (CVPR 2022) have it in two forms. In that of the published code:

    - two linear layers, of the noise and of the one-hot label, each to 64 channels of H/4 W/4, concatenated; BN;
    - twice [upsample x2, 3x3 convolution, BN, leaky ReLU 0.2] with 128, then 64 channels;
    - 3x3 convolution; tanh; BN without scale and shift, which standardises images per channel.

    In that of Table 5a each of the two convolutions is before the upsampling, and tanh is the end.

    The two convolutions before a BN have no bias, because the BN would remove it. There are thus 682,307 parameters at
    Z = 100, C = 10 and 3x32x32; the published code has 682,499.

    Args:
        latent: Z.
        classes: C.
        image_shape: (channels, height, width); height and width are multiples of 4.
        form: One of :data:`GENERATOR_FORMS`: ``"paper"`` is Table 5a.

    Raises:
        OptionError: The height or the width is not a multiple of 4.
    """

    def __init__(
        self, latent: int, classes: int, image_shape: tuple[int, int, int], form: str = "published-code"
    ) -> None:
        super().__init__()
        self.latent, self.classes = latent, classes
        channels = image_shape[0]
        height, width = _quarter(image_shape)
        self.first = (WIDTH // 2, height, width)
        self.project = nn.Linear(latent, WIDTH // 2 * height * width)
        self.project_label = nn.Linear(classes, WIDTH // 2 * height * width)
        self.norm0 = nn.BatchNorm2d(WIDTH)
        self._as_printed = form == "paper"
        convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False) if self._as_printed else UpsampleConv
        self.up1, self.norm1 = convolution(WIDTH, WIDTH), nn.BatchNorm2d(WIDTH)
        self.up2, self.norm2 = convolution(WIDTH, WIDTH // 2), nn.BatchNorm2d(WIDTH // 2)
        self.pixels = PixelConv(WIDTH // 2, channels)
        self.norm3 = nn.Identity() if self._as_printed else nn.BatchNorm2d(channels, affine=False)
        fast_layout(self)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Map noise [B, Z] and labels [B], whole numbers in [0, C), to normalised images [B, ch, H, W]."""
        parts = self.project(noise), self.project_label(_one_hot(labels, self.classes, noise))
        x = torch.cat([part.view(-1, *self.first) for part in parts], dim=1)
        x = self.norm0(x.contiguous(memory_format=torch.channels_last))
        for convolve, norm in ((self.up1, self.norm1), (self.up2, self.norm2)):
            x = F.leaky_relu(norm(convolve(x)), 0.2, inplace=True)
            x = F.interpolate(x, scale_factor=2) if self._as_printed else x
        images: Tensor = self.norm3(torch.tanh(self.pixels(x)))
        return images


class FeatureGenerator(nn.Module):
    """The generator of FLBoost-f and of FLBoost's FedGen: noise and labels to the input of a model's last layer.

    It follows Table 5b of Zhang, Shen, Ding, Tao, Duan (CVPR 2022), with width 8192 and the 512 features of ResNet-18:

    - two linear layers, of the noise and of the one-hot label, to half the width each, concatenated; BN;
    - linear to the width, BN, leaky ReLU 0.2;
    - linear to the features.

    The linear layers before a BN have no bias, because the BN would remove it.

    Args:
        latent: Z.
        classes: C.
        features: F.
        width: Of the hidden layers, an even number.

    Raises:
        OptionError: The width is odd.
    """

    def __init__(self, latent: int, classes: int, features: int, width: int = 512) -> None:
        super().__init__()
        if width % 2:
            raise OptionError(f"a generator's width is {width}: must be an even number")
        self.latent, self.classes = latent, classes
        self.project = nn.Linear(latent, width // 2, bias=False)
        self.project_label = nn.Linear(classes, width // 2, bias=False)
        self.norm0 = nn.BatchNorm1d(width)
        self.hidden, self.norm1 = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)
        self.features = nn.Linear(width, features)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Map noise [B, Z] and labels [B], whole numbers in [0, C), to features [B, F]."""
        parts = self.project(noise), self.project_label(_one_hot(labels, self.classes, noise))
        x = self.norm0(torch.cat(parts, dim=1))
        features: Tensor = self.features(F.leaky_relu(self.norm1(self.hidden(x)), 0.2, inplace=True))
        return features


def _quarter(image_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return a quarter of the height and of the width."""
    _, height, width = image_shape
    if height % 4 or width % 4:
        raise OptionError(f"input shape is {image_shape}: must have a height and a width that are multiples of 4")
    return height // 4, width // 4


def _one_hot(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return one-hot rows [B, C]; F.one_hot would synchronise the host with the GPU."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(like.dtype)
