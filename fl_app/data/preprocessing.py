"""From stored pixels to a model's input: resize, augment, normalise; all on batches, in plain torch.

The papers' order: resize when a data set is read, augment the pixels (the padding is black), then normalise. Pixels
are uint8. Examples of another type, rows of numbers and tokens, are a model's input already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from strategies.core.errors import OptionError

AUGMENTATIONS = ("none", "flip", "crop-flip")
PADDING = 4

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


def augment(images: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Apply a data set's random augmentation, drawn anew for each image.

    ``crop-flip`` is P1's and P2's augmentation of CIFAR: zero-pad by 4, crop at a random place, mirror with chance 1/2.
    ``flip``, P3's for SVHN, only mirrors.

    Args:
        images: uint8 or float [B, ch, H, W], before normalisation; left unchanged.
        kind: One of :data:`AUGMENTATIONS`.
        generator: Generator of the draws.

    Returns:
        Images of the same shape and dtype.

    Raises:
        OptionError: The kind is unknown.
    """
    if kind not in AUGMENTATIONS:
        raise OptionError(f"augmentation is {kind!r}: must be one of {', '.join(AUGMENTATIONS)}")
    if kind == "none":
        return images
    count, device = len(images), generator.device
    if kind == "flip":
        mirrored = torch.rand(count, generator=generator, device=device).to(images.device) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)
    top, left = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator, device=device).to(images.device)
    flip = torch.rand(count, generator=generator, device=device).to(images.device) < 0.5
    return crop_flip(images, top, left, flip=flip)


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
