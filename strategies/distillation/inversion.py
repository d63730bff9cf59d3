"""Images without a generator: their pixels are the parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pixels(nn.Module):
    """A batch of images as parameters, in the place of a generator.

    Args:
        start: The images [B, ch, H, W], in the models' normalised input space.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.images = nn.Parameter(start.clone(memory_format=torch.channels_last))

    def forward(self, noise: Tensor) -> Tensor:  # noqa: ARG002  a generator is given noise
        """Return the images [B, ch, H, W], in a copy: the optimiser then moves the pixels in place."""
        return self.images.clone()


def jitter(images: Tensor, most: int, rng: torch.Generator) -> Tensor:
    """Roll a batch [B, ch, H, W] by one random offset in [-most, most], down and across; pixels leave and re-enter."""
    down, across = torch.randint(-most, most + 1, (2,), generator=rng).tolist()
    return images.roll((down, across), dims=(2, 3))
