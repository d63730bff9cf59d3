"""The options that the methods with a student share, in the table ``server``; a method's config adds its own.

Defaults are those of Co-Boosting's published loop (Dai et al., ICLR 2024), which its comparison uses for every method.
A method whose paper differs declares the default again, by :func:`shared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from ..core.errors import OptionError
from ..core.options import option
from ..core.processor import ARITHMETICS
from ..teacher.augment import AUGMENTATIONS
from .distill import DistillRecipe
from .pool import quantize
from .synthesis import RESETS, Recipe

# The preset of minutes on a CPU: of every frozen teacher, and of a method whose generator makes its images.
QUICK_TEACHER: Mapping[str, Any] = {"teacher_precision": "auto"}
QUICK_GENERATOR: Mapping[str, Any] = {
    **QUICK_TEACHER, "epochs": 12, "generator_steps": 10, "generator_lr": 0.003, "batch_size": 32,
}  # fmt: skip
AUGMENTATION_NAMES = tuple(AUGMENTATIONS)
SCHEDULES = ("constant", "cosine", "one-cycle")


# Name -> help and rules of an option that several methods have; each declares it once more with its own default.
_SHARED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "epochs": (
        "server epochs T: passes over the images, or over the drawn examples that train a classifier",
        {"low": 1, "scaled": True, "main": True},
    ),
    "generator_steps": ("generator steps per epoch T_G", {"low": 1, "main": True}),
    "generator_lr": ("Adam's learning rate of the generator eta_G", {"above": 0.0}),
    "generator_clip": ("largest norm of the generator's gradient; 0: no limit", {"low": 0.0}),
    "generator_precision": (
        "arithmetic of the generator; auto: bfloat16 where the device computes in it", {"choices": ARITHMETICS},
    ),
    "latent": ("length of the noise vector z", {"low": 1, "high": 2**12}),
    "generator_width": (
        "hidden units of the generator of features, an even number", {"low": 2, "high": 2**14},
    ),
    "synthesis_batch_size": ("images made per epoch", {"low": 2}),
    "pool_cap": ("most images in the pool, the oldest are dropped first; 0: no limit", {"low": 0}),
    "pool_augmentation": (
        "augmentation of the pool's images whenever the models read them", {"choices": AUGMENTATION_NAMES},
    ),
    "augmentation": (
        "augmentation of proxy images, or of a new batch, each time the models read them",
        {"choices": AUGMENTATION_NAMES},
    ),
    "batch_size": ("images per step of the student, or of the gate, b", {"low": 2, "main": True}),
    "kd_temperature": ("temperature of the distillation loss, or of the soft decisions", {"above": 0.0, "main": True}),
    "student_lr": (
        "learning rate of the student eta_S; its largest on a one-cycle schedule", {"above": 0.0, "main": True},
    ),
    "steps_per_epoch": (
        "most batches per epoch for the student, the gate or a reweighting; 0: one pass over all images", {"low": 0},
    ),
    "weight_decay": ("weight decay of the student", {"low": 0.0}),
    "schedule": ("schedule of the student's learning rate", {"choices": SCHEDULES}),
    "student_clip": ("largest norm of the student's gradient; 0: no limit", {"low": 0.0}),
    "teacher_precision": (
        "arithmetic of the uploaded models; auto: bfloat16, which halves their time, for large models of images on a "
        "processor that computes in it",
        {"choices": ARITHMETICS},
    ),
}  # fmt: skip


def shared(name: str, default: Any) -> Any:
    """Declare an option of the table ``server`` with a method's own default."""
    meaning, rules = _SHARED[name]
    return option(default, meaning, table="server", **rules)


@dataclass(frozen=True)
class SynthesisOptions:
    """Options of the generator that makes a batch of images."""

    generator_steps: int = shared("generator_steps", 30)
    generator_lr: float = shared("generator_lr", 1e-3)
    generator_clip: float = shared("generator_clip", 10.0)
    generator_precision: str = shared("generator_precision", "auto")
    latent: int = option(256, "length of the noise vector z", low=1, setting=False)  # of every publication
    synthesis_batch_size: int = shared("synthesis_batch_size", 128)

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

    pool_cap: int = shared("pool_cap", 0)
    pool_augmentation: str = shared("pool_augmentation", "none")

    def __post_init__(self) -> None:
        """Refuse a pool that is too small for batch normalisation."""
        if self.pool_cap == 1:
            raise OptionError("setting 'server.pool-cap' is 1: must be 0 or a whole number at least 2")

    def stored(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return pixels [N, ch, H, W] in [0, 1] and their classes [N] as rows of a pool, in 8 bits as image files."""
        return {"images": quantize(images), "labels": labels}


@dataclass(frozen=True)
class TextOrCodeOptions(PoolOptions, SynthesisOptions):
    """Options in which the papers of DENSE and Co-Boosting differ from their codes, which give the defaults."""

    optimize_noise: bool = option(True, "optimise the noise together with the generator", setting=False)
    keep_images: str = option(
        "best", "images kept: those of the generator's lowest loss, or its last ones", choices=("best", "last"),
        setting=False,
    )  # fmt: skip
    generator_reset: str = option(
        "epoch", "when the generator starts anew: in every epoch, or never", choices=RESETS, setting=False
    )
    pool_precision: str = option(
        "uint8", "format of the pool's pixels: 8 bits, as in image files, or as made", choices=("uint8", "float32"),
        setting=False,
    )  # fmt: skip

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

    epochs: int = shared("epochs", 500)
    batch_size: int = shared("batch_size", 128)
    kd_temperature: float = shared("kd_temperature", 4.0)
    student_lr: float = shared("student_lr", 0.01)

    def distill_recipe(self, **fixed: Any) -> DistillRecipe:
        """Return the recipe of the student's training."""
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(DistillRecipe) if hasattr(self, entry.name)}
        return DistillRecipe(**{**chosen, **fixed})


@dataclass(frozen=True)
class StudentOptions(DistillOptions):
    """Options of the student's training in which publications differ."""

    steps_per_epoch: int = shared("steps_per_epoch", 0)
    weight_decay: float = shared("weight_decay", 1e-4)
    schedule: str = shared("schedule", "cosine")
    student_clip: float = shared("student_clip", 10.0)
    teacher_precision: str = shared("teacher_precision", "float32")


OPTIMIZER = "adam"  # of FedKD's published code, at a constant rate, without weight decay and clipping


@dataclass(frozen=True)
class ProxyStudentOptions(DistillOptions):
    """Options of a student on proxy images; the defaults are those of FedKD's published code, which FENS uses."""

    epochs: int = shared("epochs", 200)
    batch_size: int = shared("batch_size", 512)
    student_lr: float = shared("student_lr", 1e-3)
    augmentation: str = shared("augmentation", "none")
