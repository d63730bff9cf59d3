"""Noise images: smooth random fields with the spectra of natural images.

The amplitude of natural images falls with spatial frequency f about as ``f^-1``. Here the exponent is drawn for every
image, from nearly white noise to a few large blobs.

Source: Field, *Relations between the statistics of natural images and the response properties of cortical cells*, JOSA
A 1987.

Fields lack objects with edges that occlude one another, as in the dead-leaves model of natural images (Lee, Mumford and
Huang, *Occlusion models for natural images*, IJCV 2001). Networks learn more from such images than from spectra alone
(Baradad et al., *Learning to see by looking at noise*, NeurIPS 2021). :func:`overlay_shapes` adds such shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

EXPONENTS = (0.5, 3.0)  # drawn uniformly between them
# Images whose spectra are in memory together: AT_ONCE of up to 3 x 32 x 32 values each, fewer larger ones.
AT_ONCE = 1024
VALUES_AT_ONCE = AT_ONCE * 3 * 32 * 32
# A shape covers the pixels where a field, with an exponent between these two, exceeds LEVEL + SPREAD |normal|.
OUTLINES = (1.5, 3.5)
LEVEL = 0.3
SPREAD = 0.7
COVERED = 0.7  # share of images that get a layer's shapes
PLAIN = 0.5  # share of these images whose shapes have one colour

Shape = tuple[int, int, int]


def noise_images(count: int, shape: Shape, rng: torch.Generator) -> Tensor:
    """Return random fields as pixels [count, ch, H, W] in [0, 1].

    ``pixel = (1 + tanh(gain (field + offset))) / 2``: brightness and contrast differ from image to image. The channels
    of a colour image share a part of their field; the size of this part differs from image to image.

    Args:
        count: At least 1.
        shape: (channels, height, width).
        rng: A CPU generator, so that the images do not depend on the device.
    """
    return torch.cat(list(noise_batches(count, shape, rng)))


def noise_batches(count: int, shape: Shape, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield the images of :func:`noise_images` in batches [b, ch, H, W], so that memory need not hold all of them."""
    most = max(1, min(AT_ONCE, VALUES_AT_ONCE // math.prod(shape)))
    for first in range(0, count, most):
        yield _batch(min(most, count - first), shape, rng)


def overlay_shapes(images: Tensor, layers: int, rng: torch.Generator) -> Tensor:
    """Return images with shapes laid over them in layers, each shape a part of another image or of one colour.

    In a layer seven of ten images get shapes: the regions where a smooth random field is high, less than half of the
    image. One such image in two shows a random image of the batch there, without shapes; the others show one random
    colour.

    Args:
        images: Pixels [B, ch, H, W] in [0, 1]; not changed.
        layers: At least 0.
        rng: A CPU generator.
    """
    count, channels, height, width = images.shape
    low, high = OUTLINES

    def uniform(values: int = 1) -> Tensor:
        return torch.rand(count, values, 1, 1, generator=rng)

    over = images
    for _ in range(layers):
        exponent = low + (high - low) * uniform().flatten()
        field = random_fields(count, 1, exponent, (height, width), rng)
        shape = field > LEVEL + SPREAD * torch.randn(count, 1, 1, 1, generator=rng).abs()
        others = images[torch.randperm(count, generator=rng)]
        filling = torch.where(uniform() < PLAIN, uniform(channels), others)
        over = torch.where(shape & (uniform() < COVERED), filling, over)
    return over


def random_fields(count: int, channels: int, exponent: Tensor, size: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Return Gaussian fields [count, channels, H, W] whose amplitude falls as ``f^-b``, each of mean 0 and variance 1.

    Args:
        count: Images.
        channels: Fields of each image, independent of one another.
        exponent: b of every image [count].
        size: (H, W), not both 1.
        rng: A CPU generator.
    """
    height, width = size
    white = torch.randn(count, channels, height, width, generator=rng)
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = torch.inf  # fields have no constant component
    spectrum = torch.fft.rfft2(white) * frequency ** -exponent.view(-1, 1, 1, 1)
    fields: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return fields / fields.std((2, 3), keepdim=True, correction=0).clamp_min(1e-12)


def _batch(count: int, shape: Shape, rng: torch.Generator) -> Tensor:
    channels, *size = shape
    low, high = EXPONENTS
    exponent = low + (high - low) * torch.rand(count, generator=rng)
    common = random_fields(count, 1, exponent, (size[0], size[1]), rng)

    def normal(values: int = 1) -> Tensor:
        return torch.randn(count, values, 1, 1, generator=rng)

    if channels == 1:
        inputs = torch.exp(0.5 + 0.7 * normal()) * (common + normal())
    else:
        own = random_fields(count, channels, exponent, (size[0], size[1]), rng)
        shared = torch.rand(count, 1, 1, 1, generator=rng)
        field = shared.sqrt() * common + (1 - shared).sqrt() * own
        inputs = torch.exp(0.6 * normal()) * (0.6 * field + 0.5 * normal() + 0.3 * normal(channels))
    return (torch.tanh(inputs) + 1) / 2
