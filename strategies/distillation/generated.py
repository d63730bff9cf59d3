"""Synthetic images from a generator: one batch per server epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.seeds import generator, seeded_torch
from ..teacher.augment import AUGMENTATIONS, Standardize
from ..teacher.ensemble import Ensemble
from ..teacher.student import frozen
from .generators import DenseGenerator
from .synthesis import Batch, Recipe, Term, View, synthesize

if TYPE_CHECKING:
    from ..method import Job


class GeneratedImages:
    """A generator that trains against the ensemble for some steps per epoch and then makes one batch.

    It is reset for every batch, as in the published codes of DENSE and Co-Boosting.

    Args:
        job: Supplies the shape of images, the number of classes, the seed and the device.
        recipe: Of the generator loop.
        latent: Length of the noise vector z.
        batch_size: Images in a batch.
        augmentation: A key of ``AUGMENTATIONS``: the change of images before the models see them.
    """

    def __init__(self, job: Job, recipe: Recipe, *, latent: int, batch_size: int, augmentation: str = "none") -> None:
        self.job = job
        self._recipe, self._noise_shape, self._augment = recipe, (batch_size, latent), AUGMENTATIONS[augmentation]
        self._standardize = Standardize(job.normalization).to(job.device)
        with seeded_torch(job.seed, "generator"):  # its initialisation draws from torch's global state
            self.generator = DenseGenerator(latent, job.input_shape).to(job.device)
        self._capture = augmentation == "none" and job.shards is None

    def batch(
        self,
        epoch: int,
        teacher: Ensemble,
        student: nn.Module | None,
        *,
        terms: Sequence[Term],
        sort_labels: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Make the batch of an epoch.

        Args:
            epoch: From 0; determines the noise, the labels and the augmentation.
            teacher: The ensemble.
            student: For terms that use ``View.student``, held in eval mode; None if no term does.
            terms: The generator's loss.
            sort_labels: Whether the labels are in ascending order.
            tick: Called after each step.
        """
        device, rng = self.job.device, generator(self.job.seed, "synthesis", epoch)
        self.generator.reset(rng)
        noise = torch.randn(self._noise_shape, generator=rng).to(device)
        labels = torch.randint(self.job.num_classes, (len(noise),), generator=rng)
        labels = (labels.sort().values if sort_labels else labels).to(device)

        def look(images: Tensor) -> View:
            inputs = self._standardize(self._augment(images, rng))
            return View(images, inputs, labels, teacher(inputs), student(inputs) if student is not None else None)

        with frozen(student if student is not None else nn.Module()):
            images, losses = synthesize(
                self.generator, noise, look, terms=terms, recipe=self._recipe, capture=self._capture, tick=tick
            )
        return Batch(images, labels, losses)
