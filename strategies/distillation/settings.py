"""The options that the data-free methods share; a method's config adds its own.

Defaults are those of Co-Boosting's published loop (Dai et al., ICLR 2024), which its comparison uses for every method.
A method whose paper differs declares the field again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ..core.errors import OptionError
from ..core.options import option
from ..teacher.augment import AUGMENTATIONS
from .pool import quantize
from .synthesis import Recipe

Config = TypeVar("Config")
_AUGMENTATIONS = tuple(AUGMENTATIONS)
PRECISIONS = ("float32", "bfloat16")
SCHEDULES = ("constant", "cosine", "one-cycle")


@dataclass(frozen=True)
class SynthesisOptions:
    """Options of the generator that makes a batch of images."""

    generator_steps: int = option(30, "generator steps per epoch T_G", low=1)
    generator_lr: float = option(1e-3, "Adam's learning rate of the generator eta_G", above=0.0)
    generator_clip: float = option(10.0, "largest norm of the generator's gradient; 0: no limit", low=0.0)
    generator_reset: bool = option(True, "reset the generator every epoch")
    generator_precision: str = option(
        "float32", "arithmetic of the generator: bfloat16 halves its time", choices=PRECISIONS
    )
    latent: int = option(256, "length of the noise vector z", low=1)
    optimize_noise: bool = option(True, "optimise the noise together with the generator")
    synthesis_batch_size: int = option(128, "images made per epoch", low=2)
    keep_images: str = option(
        "best", "images kept: those of the generator's lowest loss, or its last ones", choices=("best", "last")
    )
    synthesis_augmentation: str = option(
        "none", "augmentation of the models' images in synthesis", choices=_AUGMENTATIONS
    )

    def recipe(self) -> Recipe:
        """Return the options as the generator loop's recipe."""
        return Recipe(
            steps=self.generator_steps,
            lr=self.generator_lr,
            clip=self.generator_clip,
            optimize_noise=self.optimize_noise,
            keep=self.keep_images,
            precision=self.generator_precision,
        )


@dataclass(frozen=True)
class PoolOptions:
    """Options of the pool that stores the synthetic images and of reading it."""

    pool_cap: int = option(0, "most images in the pool, the oldest are dropped first; 0: no limit", low=0)
    pool_precision: str = option(
        "uint8", "format of the pool's pixels: 8 bits, as in image files, or as made", choices=("uint8", "float32")
    )
    pool_augmentation: str = option(
        "none", "augmentation of the models' images in distillation", choices=_AUGMENTATIONS
    )

    def stored(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return pixels [N, ch, H, W] in [0, 1] and their classes [N] as rows of a pool."""
        return {"images": quantize(images) if self.pool_precision == "uint8" else images, "labels": labels}


@dataclass(frozen=True)
class DistillOptions:
    """Options of the student's training by the ensemble."""

    epochs: int = option(500, "server epochs T", low=1)
    steps_per_epoch: int = option(
        0, "most batches per epoch for the student, and for a reweighting; 0: one pass over all images", low=0
    )
    batch_size: int = option(128, "images per student step b", low=2)
    kd_temperature: float = option(4.0, "temperature of the distillation loss", above=0.0)
    optimizer: str = option("sgd", "optimiser of the student", choices=("sgd", "adam"))
    student_lr: float = option(0.01, "learning rate of the student eta_S", above=0.0)
    momentum: float = option(0.9, "momentum of the student's sgd", low=0.0, high=1.0)
    weight_decay: float = option(1e-4, "weight decay of the student", low=0.0)
    schedule: str = option("cosine", "schedule of the student's learning rate", choices=SCHEDULES)
    student_clip: float = option(10.0, "largest norm of the student's gradient; 0: no limit", low=0.0)
    teacher_precision: str = option(
        "float32", "arithmetic of the uploaded models: bfloat16 halves their time", choices=PRECISIONS
    )


def check_pool(config: PoolOptions, table: str) -> None:
    """Refuse a pool that is too small for batch normalisation.

    Raises:
        OptionError: The pool's cap is 1.
    """
    if config.pool_cap == 1:
        raise OptionError(f"setting '{table}.pool-cap' is 1: must be 0 or a whole number at least 2")


def preset(config: type[Config], presets: Mapping[str, Mapping[str, Any]], name: str, **changes: Any) -> Config:
    """Return the settings of a publication, with some changes.

    Args:
        config: The method's config type.
        presets: Preset name -> the fields that differ from the defaults.
        name: A key of ``presets``.
        **changes: Fields to override.

    Raises:
        OptionError: The name is unknown or a change is out of range.
    """
    if name not in presets:
        raise OptionError(f"unknown preset {name!r} of {config.__name__}: known are {', '.join(presets)}")
    return config(**{**presets[name], **changes})
