"""From pixels in [0, 1] to a model's input: differentiable augmentation, then normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..method import Normalization


def dequantize(pixels: Tensor) -> Tensor:
    """Return 8-bit pixels as numbers in [0, 1]; other dtypes stay unchanged."""
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels


class Standardize(nn.Module):
    """``(pixel - mean) / std`` per channel, as the clients normalised their images."""

    mean: Tensor
    std: Tensor

    def __init__(self, normalization: Normalization) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(normalization.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(normalization.std).view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise pixels [B, ch, H, W] in [0, 1]; tokens, which are integers, stay unchanged."""
        return (pixels - self.mean) / self.std if pixels.is_floating_point() else pixels

    def inverse(self, inputs: Tensor) -> Tensor:
        """Return the pixels [B, ch, H, W] of normalised images."""
        return inputs * self.std + self.mean


def none(images: Tensor, rng: torch.Generator) -> Tensor:  # noqa: ARG001  the signature of every augmentation
    """Return the images [B, ch, H, W] unchanged."""
    return images


def flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image [ch, H, W] of a batch left to right with probability 1/2."""
    mirrored = _coin(images.shape[0], rng).to(images.device).view(-1, 1, 1, 1)
    return torch.where(mirrored, images.flip(3), images)


def crop_flip(images: Tensor, rng: torch.Generator, pad: int = 4) -> Tensor:
    """Pad with black, crop each image to its old size at a random position, then :func:`flip`.

    Args:
        images: Pixels [B, ch, H, W] in [0, 1]; gradients pass through.
        rng: A CPU generator.
        pad: Black pixels added on every side; positions are uniform over 0..2 pad.

    Returns:
        Images [B, ch, H, W].
    """
    count, _, height, width = images.shape
    top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=rng)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(_coin(count, rng)[:, None], columns.flip(1), columns)
    rows, columns = rows.to(images.device), columns.to(images.device)
    which = torch.arange(count, device=images.device)[:, None, None]
    # Advanced indexing on both sides of the channels moves them last: [B, H, W, ch].
    return F.pad(images, [pad] * 4)[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def jitter(images: Tensor, most: int, rng: torch.Generator) -> Tensor:
    """Roll a batch [B, ch, H, W] by one random offset in [-most, most], down and across; pixels leave and re-enter."""
    down, across = torch.randint(-most, most + 1, (2,), generator=rng).tolist()
    return images.roll((down, across), dims=(2, 3))


AUGMENTATIONS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": none,
    "flip": flip,
    "crop-flip": crop_flip,
}


def _coin(count: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=rng).bool()
