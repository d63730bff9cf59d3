"""Synthetic images from a generator: one batch per server epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.seeds import generator, seeded_torch
from ..teacher.augment import AUGMENTATIONS, Standardize
from ..teacher.ensemble import Ensemble
from .generators import DenseGenerator
from .synthesis import Batch, Term, View, frozen, synthesize

if TYPE_CHECKING:
    from ..method import Job
    from .settings import SynthesisOptions


class GeneratedImages:
    """A generator that trains against the ensemble for some steps per epoch and then makes one batch.

    Args:
        job: Supplies the shape of images, the number of classes, the seed and the device.
        options: Of the synthesis.
    """

    def __init__(self, job: Job, options: SynthesisOptions) -> None:
        self.job, self.options = job, options
        with seeded_torch(job.seed, "generator"):  # its initialisation draws from torch's global state
            self.generator = DenseGenerator(options.latent, job.input_shape).to(job.device)
        self.generator.reset(generator(job.seed, "generator"))
        self._standardize = Standardize(job.normalization).to(job.device)

    def lasting(self) -> dict[str, nn.Module]:
        """Return the modules that outlive an epoch, by name: the generator, unless it is reset every epoch."""
        return {} if self.options.generator_reset else {"generator": self.generator}

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
        options, device = self.options, self.job.device
        rng = generator(self.job.seed, "synthesis", epoch)
        if options.generator_reset:
            self.generator.reset(rng)
        noise = torch.randn(options.synthesis_batch_size, options.latent, generator=rng).to(device)
        labels = torch.randint(self.job.num_classes, (len(noise),), generator=rng)
        labels = (labels.sort().values if sort_labels else labels).to(device)
        augment = AUGMENTATIONS[options.synthesis_augmentation]

        def look(images: Tensor) -> View:
            inputs = self._standardize(augment(images, rng))
            return View(images, inputs, labels, teacher(inputs), student(inputs) if student is not None else None)

        with frozen(student if student is not None else nn.Module()):
            images, losses = synthesize(self.generator, noise, look, terms=terms, recipe=options.recipe(), tick=tick)
        return Batch(images, labels, losses)
