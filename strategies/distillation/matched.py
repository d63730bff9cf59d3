"""A student, its teachers and a conditional generator at one level: images, or features before the last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..combiners.combiners import Mean
from ..combiners.opinion_pools import with_stand_ins
from ..core.errors import OptionError
from ..core.facts import holds_images
from ..core.seeds import seeded_torch
from ..method import TEACHERS
from ..teacher.ensemble import Ensemble, load_member
from ..teacher.heads import count_features, last_linear
from ..teacher.student import fast_student
from ..uploads.needs import check_gradients
from .generators import ConditionalGenerator, FeatureGenerator

if TYPE_CHECKING:
    from ..method import Job, State

LEVELS = ("images", "features")


@dataclass(frozen=True)
class Matched:
    """A generator, and the models that it is trained with.

    Attributes:
        student: The whole model, at the job's start weights.
        judge: The part of the student that takes and learns from generated inputs: the model, or its last layer.
        teacher: The uploads, or their last layers; with a teacher's pool if the job names a teacher.
        generator: (noise [B, Z], labels [B]) -> inputs of the judge.
    """

    student: nn.Module
    judge: nn.Module
    teacher: Ensemble
    generator: nn.Module

    @classmethod
    def of(cls, job: Job, level: str, latent: int, width: int, *, table: str = "flboost") -> Matched:
        """Build the models; the generator continues from the job's memory, else from a seeded initialisation.

        Args:
            job: Its uploads, start and memory.
            level: ``"images"`` or ``"features"``.
            latent: Z.
            width: Hidden units of a generator of features.
            table: The method's name, with which its settings begin.

        Raises:
            OptionError: At the level of features the last layers differ, or the memory is that of another generator.
        """
        student = fast_student(job)
        if level == "images":
            if isinstance(job.teacher, str):
                teacher, _ = TEACHERS[job.teacher].build(job)
            else:
                teacher = Ensemble.of_job(job, job.uploads, Mean())
            return cls(student, student, teacher, _generator(job, latent, width, 0, table))
        # A teacher's pool is fitted on whole models, not on their last layers.
        pool = TEACHERS[job.teacher].build(job)[1] if isinstance(job.teacher, str) else None
        members = job.uploads if pool is None else with_stand_ins(job.uploads, pool)
        heads = [last_linear(load_member(upload, job.builders))[1].to(job.device) for upload in members]
        judge = last_linear(student)[1]
        owners = ["the student", *(upload.client for upload in job.uploads)]
        features = count_features([judge, *heads], job.num_classes, owners)
        return cls(student, judge, Ensemble(heads, pool or Mean()), _generator(job, latent, width, features, table))


def check_level(job: Job, level: str, *, table: str) -> None:
    """Refuse a job whose examples or model do not fit a level.

    Args:
        job: Its uploads may be missing.
        level: ``"images"`` or ``"features"``.
        table: The method's name, with which its settings begin.

    Raises:
        OptionError: The examples are no images with sides that are multiples of 4, no gradient reaches them, or the
            student does not end with a linear layer of C outputs.
    """
    if level == "features":
        with seeded_torch(job.seed, "head"):
            head = last_linear(job.builders[job.student]())[1]
        count_features([head], job.num_classes, [job.student])
    elif not holds_images(job.input_shape) or any(side % 4 for side in job.input_shape[1:]):
        raise OptionError(
            f"setting '{table}.level' is 'images', and the examples' shape is {tuple(job.input_shape)}: must be that "
            "of images whose height and width are multiples of 4; else set the level 'features'"
        )
    else:
        check_gradients(job, f"setting '{table}.level'", "It must be 'features'")


def _generator(job: Job, latent: int, width: int, features: int, table: str) -> nn.Module:
    with seeded_torch(job.seed, table, job.server_round, "generator"):  # torch initialises from its global state
        found: nn.Module
        if features:
            found = FeatureGenerator(latent, job.num_classes, features, width)
        else:
            found = ConditionalGenerator(latent, job.num_classes, job.input_shape)
    if job.memory is not None:
        _remember(found, job.memory, table)
    return found.to(job.device)


def _remember(found: nn.Module, memory: State, table: str) -> None:
    try:
        found.load_state_dict(memory)
    except RuntimeError as error:
        raise OptionError(
            "the previous round's generator has other tensors than these settings give: keep the settings that the run "
            f"began with ({table}.level, {table}.latent, {table}.generator-width)"
        ) from error
