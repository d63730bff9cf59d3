"""Images whose pixels are parameters, and images inverted from the clients' models.

An inverted image is one that the clients that know a class predict as that class. The method is that of Mahendran and
Vedaldi, *Understanding deep image representations by inverting them*, CVPR 2015. Here many models are inverted at once,
each weighted by its examples of the class, from smooth noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..combiners.noise import random_fields
from ..method import Job
from ..teacher.augment import Standardize, jitter
from ..teacher.ensemble import Ensemble
from .consensus import weighted_cross_entropy
from .pool import quantize
from .synthesis import Recipe, Term, View, synthesize

BATCH = 256
RATE = 0.15  # Adam's learning rate of the pixels
BETAS = (0.9, 0.99)  # decay of its averages
MOST_SHIFT = 2  # largest shift of the images before each step, in pixels
SMOOTHNESS = 0.5  # weight of the total variation
EXPONENT = 2.0  # of the spectrum of the initial noise


class Pixels(nn.Module):
    """A batch of images as parameters v, in place of a generator.

    Args:
        start: v [B, ch, H, W].
        squashed: Whether the images are pixels in [0, 1], ``(1 + tanh v) / 2``; else they are v, in the models'
            normalised input space.
    """

    def __init__(self, start: Tensor, *, squashed: bool = False) -> None:
        super().__init__()
        self.values, self._squashed = nn.Parameter(start.clone(memory_format=torch.channels_last)), squashed

    def forward(self, noise: Tensor) -> Tensor:  # noqa: ARG002  the signature of a generator
        """Return the images [B, ch, H, W], never v itself, which the optimiser changes in place."""
        return (torch.tanh(self.values) + 1) / 2 if self._squashed else self.values.clone()


def invert_images(
    job: Job,
    teacher: Ensemble,
    shares: Tensor,
    labels: Tensor,
    *,
    steps: int,
    rng: torch.Generator,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return images, uint8 [N, ch, H, W], that minimise ``sum_k l_k(y) CE(f_k(x), y) + 0.5 TV(x)``.

    TV is the sum of absolute differences of neighbouring pixels in [-1, 1], per pixel. At every step the images are
    shifted by up to two pixels.

    Args:
        teacher: The members f_k.
        shares: l [M, C].
        labels: y [N].
        steps: Steps of Adam, per batch of 256.
        rng: A CPU generator.
    """
    standardize = Standardize(job.normalization).to(job.device)
    recipe = Recipe(steps=steps, lr=RATE, betas=BETAS, optimize_noise=False, keep="last")
    channels, height, width = job.input_shape
    made = []
    for part in torch.split(labels, BATCH):
        exponent = torch.full((len(part),), EXPONENT)
        start = 0.5 * random_fields(len(part), channels, exponent, (height, width), rng)
        wanted = part.to(job.device)
        weights = shares.to(job.device)[:, wanted]

        def look(pixels: Tensor, wanted: Tensor = wanted) -> View:
            inputs = standardize(jitter(pixels, MOST_SHIFT, rng))
            return View(pixels, inputs, wanted, teacher.member_logits(inputs))

        def ce(view: View, weights: Tensor = weights) -> Tensor:
            return weighted_cross_entropy(view.teacher, view.labels, weights, "per-sample")

        terms = [Term("ce", 1.0, ce), Term("tv", SMOOTHNESS, lambda view: roughness(2 * view.images - 1))]
        images, _ = synthesize(
            Pixels(start.to(job.device), squashed=True), start.new_empty(0), look, terms=terms, recipe=recipe, tick=tick
        )
        made.append(quantize(images).cpu())
    return torch.cat(made)


def roughness(images: Tensor) -> Tensor:
    """Return the sum of absolute differences of neighbours, per pixel of images [B, ch, H, W]; a scalar."""
    down, across = images.diff(dim=2), images.diff(dim=3)
    return (down.abs().sum() + across.abs().sum()) / images.numel()
