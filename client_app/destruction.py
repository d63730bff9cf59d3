"""Destructive augmentation: it keeps an image's texture and removes the features of its class.

FedOV (Diao, Li, He, ICLR 2023, https://openreview.net/forum?id=rzrqh85f4Sc) draws one of these for every image. They
work on batches of normalised images; places are in coordinates from -1 to 1, x to the right and y down.

The specification leaves four choices open. The blur's standard deviation is an eighth of the side. The erased area
gets 0, the mean of the input space. A partial rotation turns a rectangle within the image by 90 to 270 degrees.
"Twice" means twice the chance, which copying and swapping halves share.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

CROPPED = (0.1, 0.33)  # share of the area that a crop leaves
TAKEN = (0.33, 0.5)  # share of the area that is erased or turned
LONGEST = 4 / 3  # largest ratio of a rectangle's sides
BLUR = 1 / 8  # standard deviation, in sides of the image


def destroy(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Return images that are each destroyed in one of the ways of :data:`DESTRUCTIONS`, drawn at random.

    Args:
        images: Normalised [B, ch, H, H]; left unchanged.
        rng: A CPU generator.

    Returns:
        [B, ch, H, H].
    """
    destroyed = torch.empty_like(images)
    kinds = torch.randint(len(DESTRUCTIONS), (len(images),), generator=rng)
    for kind, function in enumerate(DESTRUCTIONS):
        chosen = (kinds == kind).nonzero().flatten()
        if len(chosen):
            destroyed[chosen] = function(images[chosen], rng)
    return destroyed


def resized_crop(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Cut out a tenth to a third of each image [B, ch, H, H] and enlarge it to the whole."""
    centre, half = _rectangles(len(images), CROPPED, rng)
    return _sample(images, centre + half * _coordinates(images))


def blur(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:  # noqa: ARG001  the signature of all
    """Blur each image [B, ch, H, H] strongly, by a Gaussian with mirror padding."""
    channels, side = images.shape[1], images.shape[-1]
    reach = side // 4
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype)
    weights = torch.softmax(-0.5 * (offsets / (BLUR * side)) ** 2, dim=0).repeat(channels, 1, 1, 1)
    padded = F.pad(images, [reach] * 4, mode="reflect")
    rows = F.conv2d(padded, weights, groups=channels)
    return F.conv2d(rows, weights.transpose(2, 3), groups=channels)


def erase(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Set a rectangle of a third to a half of each image [B, ch, H, H] to 0."""
    inside = _inside(images, *_rectangles(len(images), TAKEN, rng))
    return images.masked_fill(inside[:, None], 0.0)


def copy_half(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Copy one half of each image [B, ch, H, H], left, right, upper or lower, over the other."""
    half = images.shape[-1] // 2
    first = torch.arange(images.shape[-1]) % half
    return _along_an_axis(images, lambda batch, second: batch[..., first + half * second], rng)


def swap_halves(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Swap the left and right, or upper and lower, halves of each image [B, ch, H, H]."""
    return _along_an_axis(images, lambda batch, _: batch.roll(batch.shape[-1] // 2, -1), rng)


def rotate_part(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Turn a rectangle of a third to a half of each image [B, ch, H, H] by 90 to 270 degrees about its centre."""
    centre, half = _rectangles(len(images), TAKEN, rng)
    angle = _uniform((len(images), 1, 1), math.pi / 2, 3 * math.pi / 2, rng)
    x, y = (_coordinates(images) - centre).unbind(-1)
    turned = torch.stack([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y], dim=-1)
    inside = _inside(images, centre, half)
    return torch.where(inside[:, None], _sample(images, centre + turned), images)


DESTRUCTIONS: tuple[Callable[[torch.Tensor, torch.Generator], torch.Tensor], ...] = (
    resized_crop, blur, erase, copy_half, swap_halves, rotate_part, rotate_part,
)  # fmt: skip


def _along_an_axis(
    images: torch.Tensor, change: Callable[[torch.Tensor, int], torch.Tensor], rng: torch.Generator
) -> torch.Tensor:
    """Change each image along its rows or its columns, beginning with its first or its second half."""
    axis, second = torch.randint(2, (2, len(images), 1, 1, 1), generator=rng).bool()
    upright, turned = images, images.transpose(2, 3)
    rows = torch.where(second, change(upright, 1), change(upright, 0))
    columns = torch.where(second, change(turned, 1), change(turned, 0)).transpose(2, 3)
    return torch.where(axis, columns, rows)


def _rectangles(count: int, area: tuple[float, float], rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return centres and half sides (x, y), each [B, 1, 1, 2], of rectangles within the image.

    Their share of its area is uniform, their ratio of sides uniform in the logarithm.
    """
    share = _uniform((count,), *area, rng)
    ratio = _uniform((count,), -math.log(LONGEST), math.log(LONGEST), rng).exp()
    half = torch.stack([(share * ratio).sqrt(), (share / ratio).sqrt()], dim=-1)[:, None, None]
    return (1 - half) * _uniform(half.shape, -1.0, 1.0, rng), half


def _uniform(shape: tuple[int, ...], low: float, high: float, rng: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(shape, generator=rng)


def _coordinates(images: torch.Tensor) -> torch.Tensor:
    """Return (x, y) of every pixel's centre [H, H, 2]."""
    side = images.shape[-1]
    line = (2 * torch.arange(side) + 1) / side - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=-1)


def _inside(images: torch.Tensor, centre: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Return which pixels lie in each image's rectangle, bool [B, H, H]."""
    return ((_coordinates(images) - centre).abs() < half).all(-1)


def _sample(images: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sample each image at its places [B, H, H, 2], bilinear; places outside get the border's value."""
    return F.grid_sample(images, places, padding_mode="border", align_corners=False)
