"""The generator loop: makes one batch of synthetic images that minimise a sum of loss terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.gpu import Graphed, eager
from ..core.processor import in_bfloat16
from ..core.seeds import generator, seeded_torch
from ..core.work import work
from ..method import Job
from ..teacher.augment import AUGMENTATIONS, Standardize
from ..teacher.ensemble import Ensemble
from ..teacher.student import frozen
from .distill import take_step
from .generators import DenseGenerator

RESETS = ("epoch", "never")


@dataclass(frozen=True)
class View:
    """One batch with the models' logits, the argument of a loss term.

    Attributes:
        images: Pixels as the generator made them [B, ch, H, W], in [0, 1]; those of an inversion are normalised.
        labels: The target classes of the images [B].
        teacher: The teacher's logits [B, C].
        student: The student's logits [B, C]; None if no term needs them.
    """

    images: Tensor
    inputs: Tensor
    labels: Tensor
    teacher: Tensor
    student: Tensor | None = None


@dataclass(frozen=True)
class Term:
    """One addend of the generator's loss, ``weight * loss(view)``."""

    name: str
    weight: float
    loss: Callable[[View], Tensor]


@dataclass(frozen=True)
class Batch:
    """The result of a synthesis.

    Attributes:
        images: Pixels [b, ch, H, W] in [0, 1].
        losses: The last step's loss terms by name, with their weighted sum as ``"generator"``.
    """

    images: Tensor
    labels: Tensor
    losses: dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """The settings of the generator loop.

    Attributes:
        steps: T_G, optimiser steps.
        lr: Adam's learning rate; each batch gets a new optimiser.
        betas: Decay of Adam's averages.
        clip: Largest norm of the generator's gradient; 0 does not clip.
        optimize_noise: Whether Adam optimises the noise together with the generator.
        keep: ``"best"`` returns the images of the lowest total loss, ``"last"`` those of the generator after its
            last step.
        precision: The generator's arithmetic, a choice of :func:`.core.processor.in_bfloat16`; weights and images stay
            float32.
    """

    steps: int = 30
    lr: float = 1e-3
    betas: tuple[float, float] = (0.5, 0.999)
    clip: float = 0.0
    optimize_noise: bool = True
    keep: str = "best"
    precision: str = "float32"


def synthesize(
    generator: nn.Module,
    noise: Tensor,
    look: Callable[[Tensor], View],
    *,
    terms: Sequence[Term],
    recipe: Recipe,
    capture: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Tensor, dict[str, float]]:
    """Train a generator for a few steps on one batch of noise, and return its images.

    All steps use the same noise (and the labels inside ``look``), so that one call yields one batch.

    Args:
        generator: [B, Z] -> pixels [B, ch, H, W] in [0, 1]; trained in place, in train mode.
        noise: z [B, Z].
        terms: The addends of the loss; terms of weight 0 are not computed.
        capture: Whether ``look`` and the terms draw no random numbers, so that a GPU may replay a step as one graph.

    Returns:
        The kept images [B, ch, H, W], detached, and the last step's loss terms by name, with their weighted sum as
        ``"generator"``.

    Raises:
        OptionError: No term depends on the images.
    """
    noise = noise.detach().clone().requires_grad_(recipe.optimize_noise)
    terms = [term for term in terms if term.weight]
    leaves = [*generator.parameters(), *([noise] if recipe.optimize_noise else [])]
    on_gpu = leaves[0].is_cuda
    optimizer = eager(torch.optim.Adam)(leaves, lr=recipe.lr, betas=recipe.betas, fused=True, capturable=on_gpu)
    generator.train()
    bf16 = in_bfloat16(recipe.precision, leaves[0].device.type)
    kept = _BestImages()

    def step() -> Tensor:
        images = generate(generator, noise, bf16=bf16)
        view = look(images)
        losses = {term.name: term.loss(view) for term in terms}
        total = _total(terms, losses)
        take_step(total, generator, optimizer, clip=recipe.clip)
        work().generator_stepped(bf16)
        kept.offer(images.detach(), total.detach())
        return torch.stack([total.new_zeros(()) + loss.detach() for loss in (*losses.values(), total)])

    repeated, values = Graphed(step, leaves[0].device, capture=capture), torch.zeros(0)
    for _ in range(recipe.steps):
        values = repeated()
        tick()
    images = kept.images
    if recipe.keep == "last" or images is None:
        with torch.no_grad():
            images = generate(generator, noise, bf16=bf16)
    return images, dict(zip([*(term.name for term in terms), "generator"], values.tolist(), strict=False))


class _BestImages:
    """The images of the lowest loss so far."""

    def __init__(self) -> None:
        self.images: Tensor | None = None

    def offer(self, images: Tensor, loss: Tensor) -> None:
        """Keep images [B, ch, H, W] if their loss, a scalar, is the lowest."""
        if self.images is None:
            self.images, self._loss = images.clone(), loss.nan_to_num(math.inf, math.inf, -math.inf)
            return
        # Chosen by torch.where instead of `if`, so that a GPU never waits for the host.
        better = loss < self._loss
        self.images.copy_(torch.where(better, images, self.images))
        self._loss.copy_(torch.where(better, loss, self._loss))


def generate(generator: nn.Module, noise: Tensor, *labels: Tensor, bf16: bool) -> Tensor:
    """Return what a generator makes of noise, in the type of its weights.

    Args:
        noise: z [B, Z].
        labels: The classes [B] of a conditional generator.
        bf16: Whether it computes in bfloat16.
    """
    with torch.autocast(noise.device.type, torch.bfloat16, enabled=bf16):
        made: Tensor = generator(noise, *labels)
    return made.float() if made.dtype == torch.bfloat16 else made


def _total(terms: Sequence[Term], losses: dict[str, Tensor]) -> Tensor:
    """Return ``sum_j weight_j * loss_j``, a scalar."""
    total = sum((term.weight * losses[term.name] for term in terms), torch.zeros(()))
    if not total.requires_grad:
        names = ", ".join(losses) or "none at all"
        raise OptionError(
            f"the generator has nothing to learn from: no loss term with a weight ({names}) depends on its images"
        )
    return total


# Synthetic images from a generator: one batch per server epoch.


class GeneratedImages:
    """A generator that trains against the ensemble for some steps per epoch and then makes one batch.

    It is reset for every batch, as in the published codes of DENSE and Co-Boosting, or never, as in their texts. One
    that is never reset is part of the state between epochs: :attr:`modules`.

    Args:
        job: Supplies the shape of images, the number of classes, the seed and the device.
        augmentation: A key of ``AUGMENTATIONS``: the change of images before the models see them.
        reset: One of :data:`RESETS`: ``"epoch"`` draws the generator's weights anew for every batch.

    Attributes:
        modules: The modules that a checkpoint must hold, by name.
    """

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        *,
        latent: int,
        batch_size: int,
        augmentation: str = "none",
        reset: str = "epoch",
    ) -> None:
        self.job = job
        self._recipe, self._noise_shape, self._augment = recipe, (batch_size, latent), AUGMENTATIONS[augmentation]
        self._standardize = Standardize(job.normalization).to(job.device)
        with seeded_torch(job.seed, "generator"):  # its initialisation draws from torch's global state
            self.generator = DenseGenerator(latent, job.input_shape).to(job.device)
        self._resets = reset == "epoch"
        self.modules: dict[str, nn.Module] = {} if self._resets else {"generator": self.generator}
        if not self._resets:
            self.generator.reset(generator(job.seed, "generator"))
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
            student: For terms that use ``View.student``, held in eval mode; None if no term does.
            sort_labels: Whether the labels are in ascending order.
        """
        device, rng = self.job.device, generator(self.job.seed, "synthesis", epoch)
        if self._resets:
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
