"""A student, its teachers and a conditional generator at one level: images, or features before the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..combiners.combiners import Mean
from ..combiners.opinion_pools import with_stand_ins
from ..core.errors import OptionError
from ..core.facts import holds_images
from ..core.seeds import build_module, seeded_torch
from ..method import TEACHERS, Job, Progress, State
from ..teacher.ensemble import Ensemble, load_member
from ..teacher.heads import count_features, last_linear
from ..teacher.student import fast_student
from ..uploads.needs import check_gradients
from .generators import ConditionalGenerator, FeatureGenerator

LEVELS = ("images", "features")


@dataclass(frozen=True)
class Matched:
    """A generator, and the models that it is trained with.

    Attributes:
        judge: The part of the student that takes and learns from generated inputs: the model, or its last layer.
        teacher: The uploads, or their last layers; with a teacher's pool if the job names a teacher.
        generator: (noise [B, Z], labels [B]) -> inputs of the judge.
    """

    student: nn.Module
    judge: nn.Module
    teacher: Ensemble
    generator: nn.Module

    @classmethod
    def of(
        cls, job: Job, level: str, latent: int, width: int, *, form: str = "published-code", table: str = "flboost"
    ) -> Matched:
        """Build the models; the generator continues from the job's memory, else from a seeded initialisation.

        Args:
            level: ``"images"`` or ``"features"``.
            latent: Z.
            form: Of a generator of images, see :class:`.ConditionalGenerator`.

        Raises:
            OptionError: At the level of features the last layers differ, or the memory is that of another generator.
        """
        student = fast_student(job)
        if level == "images":
            if isinstance(job.teacher, str):
                teacher, _ = TEACHERS[job.teacher].build(job)
            else:
                teacher = Ensemble.of_job(job, job.uploads, Mean())
            return cls(student, student, teacher, _generator(job, latent, width, 0, table, form))
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

    Raises:
        OptionError: The examples are no images with sides that are multiples of 4, no gradient reaches them, or the
            student does not end with a linear layer of C outputs.
    """
    if level == "features":
        head = last_linear(build_module(job.builders[job.student]))[1]
        count_features([head], job.num_classes, [job.student])
    elif not holds_images(job.input_shape) or any(side % 4 for side in job.input_shape[1:]):
        raise OptionError(
            f"setting '{table}.level' is 'images', and the examples' shape is {tuple(job.input_shape)}: must be that "
            "of images whose height and width are multiples of 4; else set the level 'features'"
        )
    else:
        check_gradients(job, f"setting '{table}.level'", "It must be 'features'")


def _generator(job: Job, latent: int, width: int, features: int, table: str, form: str = "published-code") -> nn.Module:
    with seeded_torch(job.seed, table, job.server_round, "generator"):  # torch initialises from its global state
        found: nn.Module
        if features:
            found = FeatureGenerator(latent, job.num_classes, features, width)
        else:
            found = ConditionalGenerator(latent, job.num_classes, job.input_shape, form)
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


# Labels for generated examples, as frequent as among the clients' examples, and the clients' weights for them.

DRAWS = ("fixed", "independent")
PARTS = 1000  # estimates become integers: parts of an example
MOST = 10**9  # the most parts of all examples


def class_weights(counts: Sequence[Sequence[int]]) -> Tensor:
    """Return ``w_{y,k} = n_k^y / sum_j n_j^y`` [M, C]; equal weights for a class that no client holds.

    Args:
        counts: n_k^y [M, C].
    """
    held = torch.tensor(counts, dtype=torch.float64)
    total = held.sum(0, keepdim=True)
    return torch.where(total > 0, held / total.clamp_min(1.0), 1.0 / len(held)).float()


def draw_labels(held: Sequence[int], count: int, draw: str, rng: torch.Generator) -> Tensor:
    """Return labels [count] with p(y) = n^y / sum_c n^c, in a random order; a class with n^y = 0 is never drawn.

    The arithmetic is in integers, so that rounding changes no label.

    Args:
        held: n^y at least 0, not all zero [C]; shares of :data:`MOST` replace more examples than that.
        draw: ``"fixed"``: class c gets the places from ``floor(P(c - 1) count)`` to ``floor(P(c) count)``, P the
            cumulative p, then all are shuffled; ``"independent"``: each label is drawn independently.
        rng: A CPU generator.
    """
    if (claimed := sum(held)) > MOST:  # the products below must stay within 64 bits
        held = [max(min(count, 1), count * MOST // claimed) for count in held]
    ends = torch.tensor(held, dtype=torch.int64).cumsum(0)
    total = int(ends[-1])
    if draw == "independent":
        return torch.searchsorted(ends, torch.randint(total, (count,), generator=rng), right=True)
    places = ends * count // total
    labels = torch.searchsorted(places, torch.arange(count), right=True)
    return labels[torch.randperm(count, generator=rng)]


def shares_of(
    job: Job, progress: Progress, *, labels: str, weights: str, found: Tensor | None = None
) -> tuple[list[int], Tensor]:
    """Return the frequency of each class among drawn labels, and each client's weight for an example of the class.

    Args:
        labels: ``"counts"``, or ``"uniform"``: every class that some client holds equally often.
        weights: ``"per-class"``: alpha^{k,y} = n_k^y / sum_j n_j^y; or ``"uniform"``: 1/M.
        found: Another n [M, C], such as estimates, which replaces the uploaded counts.

    Returns:
        n^y [C], not all zero, and alpha [M, C]. If a client's counts are unknown, both are uniform.
    """
    members, classes = len(job.uploads), job.num_classes
    equal = torch.full((members, classes), 1.0 / members)
    counts = [upload.label_counts for upload in job.uploads if upload.label_counts is not None]
    silent = [upload.client for upload in job.uploads if not any(upload.label_counts or ())]
    if found is not None:
        parts = found.double() * min(PARTS, MOST / max(1.0, float(found.double().sum())))
        counts = [tuple(row) for row in parts.round().long().tolist()]
    held = [sum(column) for column in zip(*counts, strict=True)]
    if len(counts) < members or not any(held):
        if labels == "counts" or weights == "per-class":
            progress.record(
                {"note": f"no label counts from {', '.join(silent)}: all classes and clients weigh the same"}
            )
        return [1] * classes, equal
    drawn = held if labels == "counts" else [int(count > 0) for count in held]
    return drawn, class_weights(counts) if weights == "per-class" else equal
