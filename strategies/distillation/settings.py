"""The options that the data-free methods share; a method's config adds its own.

Defaults are those of Co-Boosting's published loop (Dai et al., ICLR 2024), which its comparison uses for every method.
A method whose paper differs declares the field again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from ..core.errors import OptionError
from ..core.options import option
from ..teacher.augment import AUGMENTATIONS
from .distill import DistillRecipe
from .pool import quantize
from .synthesis import ARITHMETICS, Recipe

AUGMENTATION_NAMES = tuple(AUGMENTATIONS)
PRECISIONS = ("float32", "bfloat16")
SCHEDULES = ("constant", "cosine", "one-cycle")


@dataclass(frozen=True)
class SynthesisOptions:
    """Options of the generator that makes a batch of images."""

    generator_steps: int = option(30, "generator steps per epoch T_G", low=1)
    generator_lr: float = option(1e-3, "Adam's learning rate of the generator eta_G", above=0.0)
    generator_clip: float = option(10.0, "largest norm of the generator's gradient; 0: no limit", low=0.0)
    generator_precision: str = option(
        "auto", "arithmetic of the generator; auto: bfloat16 where the device computes in it", choices=ARITHMETICS
    )
    latent: int = option(256, "length of the noise vector z", low=1)
    synthesis_batch_size: int = option(128, "images made per epoch", low=2)

    def recipe(self) -> Recipe:
        """Return the recipe of the generator loop."""
        return Recipe(
            steps=self.generator_steps,
            lr=self.generator_lr,
            clip=self.generator_clip,
            precision=self.generator_precision,
        )


@dataclass(frozen=True)
class PoolOptions:
    """Options of the pool that stores the synthetic images and of reading it."""

    pool_cap: int = option(0, "most images in the pool, the oldest are dropped first; 0: no limit", low=0)
    pool_augmentation: str = option(
        "none", "augmentation of the models' images in distillation", choices=AUGMENTATION_NAMES
    )

    def stored(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return pixels [N, ch, H, W] in [0, 1] and their classes [N] as rows of a pool, in 8 bits as image files."""
        return {"images": quantize(images), "labels": labels}


@dataclass(frozen=True)
class TextOrCodeOptions(PoolOptions, SynthesisOptions):
    """Options in which the papers of DENSE and Co-Boosting differ from their codes, which give the defaults."""

    optimize_noise: bool = option(True, "optimise the noise together with the generator")
    keep_images: str = option(
        "best", "images kept: those of the generator's lowest loss, or its last ones", choices=("best", "last")
    )
    pool_precision: str = option(
        "uint8", "format of the pool's pixels: 8 bits, as in image files, or as made", choices=("uint8", "float32")
    )

    def recipe(self) -> Recipe:
        """Return the recipe of the generator loop."""
        return replace(super().recipe(), optimize_noise=self.optimize_noise, keep=self.keep_images)

    def stored(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return pixels [N, ch, H, W] in [0, 1] and their classes [N] as rows of a pool."""
        rows = super().stored(images, labels)
        return rows if self.pool_precision == "uint8" else {**rows, "images": images}


@dataclass(frozen=True)
class DistillOptions:
    """Options of the student's training by the ensemble."""

    epochs: int = option(500, "server epochs T", low=1, scaled=True)
    batch_size: int = option(128, "images per student step b", low=2)
    kd_temperature: float = option(4.0, "temperature of the distillation loss", above=0.0)
    student_lr: float = option(0.01, "learning rate of the student eta_S", above=0.0)

    def distill_recipe(self, **fixed: Any) -> DistillRecipe:
        """Return the recipe of the student's training.

        Args:
            **fixed: Entries of the recipe that the method fixes.
        """
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(DistillRecipe) if hasattr(self, entry.name)}
        return DistillRecipe(**{**chosen, **fixed})


@dataclass(frozen=True)
class StudentOptions(DistillOptions):
    """Options of the student's training in which publications differ."""

    steps_per_epoch: int = option(
        0, "most batches per epoch for the student, and for a reweighting; 0: one pass over all images", low=0
    )
    weight_decay: float = option(1e-4, "weight decay of the student", low=0.0)
    schedule: str = option("cosine", "schedule of the student's learning rate", choices=SCHEDULES)
    student_clip: float = option(10.0, "largest norm of the student's gradient; 0: no limit", low=0.0)
    teacher_precision: str = option(
        "float32", "arithmetic of the uploaded models: bfloat16 halves their time", choices=PRECISIONS
    )


OPTIMIZER = "adam"  # of FedKD's published code, at a constant rate, without weight decay and clipping


@dataclass(frozen=True)
class ProxyStudentOptions(DistillOptions):
    """Options of a student on proxy images; the defaults are those of FedKD's published code, which FENS uses."""

    epochs: int = option(200, "server epochs T", low=1, scaled=True)
    batch_size: int = option(512, "images per student step b", low=2)
    student_lr: float = option(1e-3, "learning rate of the student eta_S", above=0.0)
    augmentation: str = option(
        "none", "change of the images each time the student reads them", choices=AUGMENTATION_NAMES
    )


def check_pool(config: PoolOptions, table: str) -> None:
    """Refuse a pool that is too small for batch normalisation.

    Raises:
        OptionError: The pool's cap is 1.
    """
    if config.pool_cap == 1:
        raise OptionError(f"setting '{table}.pool-cap' is 1: must be 0 or a whole number at least 2")
