"""From stored pixels to a model's input: resize, augment, normalise; all on batches, in plain torch.

The papers' order: resize when a data set is read, augment the pixels (the padding is black), then normalise. Pixels
are uint8. Examples of another type, rows of numbers and tokens, are a model's input already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from strategies.core.errors import DataError, OptionError

AUGMENTATIONS = ("none", "flip", "crop-flip", "rotate-flip", "resized-crop-flip")
PADDING = 4
DEGREES = 20.0  # of a rotation, to either side
LEFT = (0.8, 1.0)  # share of the area that a resized crop leaves
RATIO = (3 / 4, 4 / 3)  # of its sides
TRIES = 10  # for a rectangle that fits
ROUNDING = 1e-3  # by which pixels that a user has resized may leave [0, 1]

# Images per call: bounds the memory of a resize beside its result.
_CHUNK = 4096


def resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Resize to squares, bilinear with antialiasing: torchvision's ``Resize`` of 8-bit images, within one grey level.

    Args:
        images: uint8 [N, ch, H, W] on the CPU; a tensor of another type holds no images.
        size: Height and width of the result, in pixels; images of this size are returned unchanged.

    Returns:
        uint8 [N, ch, size, size]; a tensor of another type is returned unchanged.
    """
    if images.dtype != torch.uint8 or images.shape[-2:] == (size, size):
        return images
    resized = images.new_empty((*images.shape[:2], size, size))
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        resized[start : start + _CHUNK] = F.interpolate(chunk, size=(size, size), mode="bilinear", antialias=True)
    return resized


def normalize(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return ``(pixel / 255 - mean) / std``; a tensor of another type than uint8 is returned unchanged.

    Args:
        images: uint8 [B, ch, H, W]; a tensor of another type is a model's input already, of any shape.
        mean: One number per channel, of pixels in [0, 1].
        std: One number per channel, positive.

    Returns:
        float32 [B, ch, H, W], on the device of the images; or the unchanged input.
    """
    if images.dtype != torch.uint8:
        return images
    shift, scale = (torch.tensor(facts, device=images.device).view(-1, 1, 1) for facts in (mean, std))
    return images.float().div_(255).sub_(shift).div_(scale)


def check_pixels(images: torch.Tensor, what: str) -> None:
    """Refuse float images with values outside [0, 1], for what works on pixels and not on a model's input.

    Args:
        images: [B, ch, H, W]; of another type than floats they pass.
        what: The examples' name, for the message.

    Raises:
        DataError: A value is outside; the message tells none.
    """
    if images.is_floating_point() and images.numel():
        low, high = torch.aminmax(images)
        if low < -ROUNDING or high > 1.0 + ROUNDING:
            raise DataError(
                f"{what} has float images with values outside [0, 1]: must be pixels in [0, 1], or uint8, because "
                "backbones, FAFI, FedCVAE-Ens and backdoors work on pixels"
            )


def unit_pixels(images: torch.Tensor) -> torch.Tensor:
    """Return pixels in [0, 1] as float32: uint8 images divided by 255, float images as they are.

    Args:
        images: [B, ch, H, W].

    Raises:
        DataError: Float images have values outside [0, 1].
    """
    check_pixels(images, "the data set")
    return images if images.is_floating_point() else images.float() / 255


def augment(images: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Apply a data set's random augmentation, drawn anew for each image; shape and dtype stay.

    ``crop-flip`` is Co-Boosting's and DENSE's for CIFAR: zero-pad by 4, crop at a random place, mirror with chance 1/2.
    ``flip``, FENS's for SVHN, only mirrors. ``rotate-flip``, DENSE's for Tiny-ImageNet, turns by up to 20 degrees, with
    nearest pixels on black, and mirrors. ``resized-crop-flip``, Co-Boosting's for domains, enlarges 80 to 100 % of the
    area, and mirrors.

    Args:
        images: uint8 or float [B, ch, H, W], before normalisation; left unchanged.
        kind: One of :data:`AUGMENTATIONS`.

    Raises:
        OptionError: The kind is unknown.
    """
    if kind not in AUGMENTATIONS:
        raise OptionError(f"augmentation is {kind!r}: must be one of {', '.join(AUGMENTATIONS)}")
    if kind == "none":
        return images
    if kind == "flip":
        count, device = len(images), generator.device
        mirrored = torch.rand(count, generator=generator, device=device).to(images.device) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)
    if kind == "crop-flip":
        count, device = len(images), generator.device
        top, left = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator, device=device).to(images.device)
        flip = torch.rand(count, generator=generator, device=device).to(images.device) < 0.5
        return crop_flip(images, top, left, flip=flip)
    turned = _rotated(images, generator) if kind == "rotate-flip" else enlarged(images, LEFT, RATIO, generator)
    return augment(turned, "flip", generator)


def _rotated(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    angles = uniform((len(images),), -math.radians(DEGREES), math.radians(DEGREES), generator)
    zeros = torch.zeros_like(angles)
    rows = [torch.stack([angles.cos(), -angles.sin(), zeros], 1), torch.stack([angles.sin(), angles.cos(), zeros], 1)]
    return _warped(images, torch.stack(rows, 1), "nearest")


def enlarged(
    images: torch.Tensor,
    area: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
    *,
    draws: int = 0,
) -> torch.Tensor:
    """Enlarge a part of each image to the whole, bilinear; shape and dtype stay.

    Args:
        images: uint8 or float [B, ch, H, W].
        area: Least and largest share of the image's area.
        ratio: Least and largest ratio of the part's width to its height.
        draws: The number of parts that are drawn, 1 for all images or B; 0: B.
    """
    centre, half = (places.view(-1, 2) for places in rectangles(draws or len(images), area, ratio, generator))
    transforms = torch.cat([torch.diag_embed(half), centre[..., None]], dim=2)
    return _warped(images, transforms.expand(len(images), 2, 3), "bilinear")


def _warped(images: torch.Tensor, transforms: torch.Tensor, mode: str) -> torch.Tensor:
    """Sample each image at the places of its affine map [B, 2, 3], which are in coordinates from -1 to 1."""
    grid = F.affine_grid(transforms.to(images.device), list(images.shape), align_corners=False)
    border = "zeros" if mode == "nearest" else "border"
    found = F.grid_sample(images.float(), grid, mode=mode, padding_mode=border, align_corners=False)
    return (found if images.is_floating_point() else found.round()).to(images.dtype)


def rectangles(
    count: int, area: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rectangles within an image, in coordinates from -1 to 1: x to the right, y down.

    One that does not fit is drawn again; after :data:`TRIES` it is made to fit.

    Args:
        count: Number B of rectangles.
        area: Least and largest share of the image's area, uniform between them.
        ratio: Least and largest ratio of width to height, uniform in the logarithm.

    Returns:
        Centres and half sides (x, y), each [B, 1, 1, 2].
    """
    share = uniform((TRIES, count), *area, generator)
    sides = uniform((TRIES, count), math.log(ratio[0]), math.log(ratio[1]), generator).exp()
    halves = torch.stack([(share * sides).sqrt(), (share / sides).sqrt()], dim=-1)
    first = (halves <= 1).all(-1).int().argmax(0)
    half = halves[first, torch.arange(count, device=first.device)].clamp(max=1.0)[:, None, None]
    return (1 - half) * uniform(half.shape, -1.0, 1.0, generator), half


def uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Return numbers drawn uniformly from [low, high), float32 of a shape, on the generator's device."""
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)


def crop_flip(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, *, flip: torch.Tensor) -> torch.Tensor:
    """Zero-pad by :data:`PADDING`, crop each image back to its size at its own offset, and mirror some.

    Args:
        images: [B, ch, H, W].
        top: First row of each crop [B], in 0 .. 2 * PADDING.
        left: First column of each crop [B], in 0 .. 2 * PADDING.
        flip: Which crops are mirrored left to right [B], bool.

    Returns:
        [B, ch, H, W].
    """
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, [PADDING] * 4)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = left[:, None] + torch.arange(width, device=device)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
