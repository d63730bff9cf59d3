"""The student of a server stage, and its training by the teacher: one pass over a table, or all epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from ..combiners.combiners import Mean, build_combiner
from ..combiners.opinion_pools import OpinionPool, with_stand_ins
from ..combiners.outcomes import find_members
from ..core.gpu import Graphed, make_optimizer, set_rate
from ..core.seeds import generator
from ..method import TEACHERS, Job, Outcome, Progress
from ..teacher.augment import AUGMENTATIONS, Standardize, dequantize
from ..teacher.ensemble import Ensemble
from ..teacher.student import fast_student
from .distill import Distillation, DistillRecipe, Loss
from .epochs import Stage, learning_rate, run_epochs
from .losses import soft_kl
from .pool import Pool, batch_count, shuffled_batches, shuffled_groups
from .settings import PoolOptions
from .synthesis import Batch

# Makes one epoch's images, given its number and a callable for after each step.
Make = Callable[[int, Callable[[], None]], Batch]
Perturb = Callable[[Tensor, torch.Generator], Tensor]


def build_teacher(
    job: Job, combiner: nn.Module | None = None, *, precision: str = "float32", watched: bool = False
) -> Ensemble:
    """Return the ensemble that a job's student learns from.

    Without a :attr:`~strategies.method.Job.teacher` it is all uploads with the method's combiner. A key of
    ``TEACHERS`` stands for all uploads with the pool of that teacher. An ensemble by reference has its own members,
    combiner and quantisation; bfloat16 arithmetic would undo the quantisation, so that its precision counts.

    Args:
        combiner: The method's own, a module [M, B, C] -> [B, ...]; None for the plain mean of logits.
        precision: Of the members' arithmetic, ``"float32"`` or ``"bfloat16"``.
        watched: Whether a loss reads the members' layers, which must then stay unchanged.

    Raises:
        OneShotError: The job's teacher has a member without an upload.
    """
    uploads, combiner = job.uploads, Mean() if combiner is None else combiner
    if isinstance(job.teacher, str):
        teacher: Ensemble = TEACHERS[job.teacher].build(job, fold=not watched, precision=precision)[0]
        return teacher
    if (spec := job.teacher) is not None:
        uploads = find_members(job, spec)
        combiner = build_combiner(spec.combiner, spec.weights, job.builders[uploads[0].architecture])
        if isinstance(combiner, OpinionPool):
            uploads = with_stand_ins(uploads, combiner)
        precision = precision if spec.precision == "float32" else spec.precision
    return Ensemble.of_job(job, uploads, combiner, fold=not watched, precision=precision)


class Learner:
    """A student, its optimiser, and the teacher that it learns from.

    Args:
        augmentation: A key of ``AUGMENTATIONS``: the change of images each time they are read.
        loss: The loss to minimise; by default :func:`.losses.soft_kl` at the recipe's temperature.
        asked_once: Whether the teacher sees the images unchanged while the student sees them augmented.
        frozen_statistics: Whether the student's batch normalisation keeps its initial statistics.
    """

    def __init__(
        self,
        job: Job,
        teacher: Ensemble,
        recipe: DistillRecipe,
        *,
        augmentation: str = "none",
        loss: Loss | None = None,
        asked_once: bool = False,
        frozen_statistics: bool = False,
    ) -> None:
        self.job, self.teacher, self.recipe = job, teacher, recipe
        self.standardize = Standardize(job.normalization).to(job.device)
        self._together = teacher.batches_at_once(math.prod(job.input_shape))
        self.student = fast_student(job)
        self.optimizer = make_optimizer(
            recipe.optimizer,
            self.student.parameters(),
            recipe.student_lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        self._augment, self.reads_unchanged = AUGMENTATIONS[augmentation], augmentation == "none"
        self._cache_logits = self.reads_unchanged or asked_once
        loss = loss or partial(soft_kl, temperature=recipe.kd_temperature)
        self._distillation = Distillation(
            self.student, self.optimizer, loss=loss, clip=recipe.student_clip, frozen_statistics=frozen_statistics
        )
        self._teach = Graphed(self._taught, job.device, capture=teacher.is_local)

    def learn(
        self,
        table: Mapping[str, Tensor],
        epoch: int,
        *,
        perturb: Perturb | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> float:
        """Pass once over a table of images, one optimiser step per batch, and return the mean loss.

        Args:
            table: ``images`` [N, ch, H, W], uint8 or in [0, 1]. If the teacher's answers do not change, a column
                ``logits`` [N, C] may hold them and save its forward pass.
            epoch: From 0; determines the order, the augmentation and the learning rate.
            perturb: A change of the normalised images [B, ch, H, W] that teacher and student both see.
        """
        return self._distillation.learn(self._lessons(table, epoch, perturb), tick)

    def steps(self, table: Mapping[str, Tensor]) -> int:
        """Return the number of steps of a pass over a table."""
        return batch_count(len(table["images"]), self.recipe.batch_size, most=self.recipe.steps_per_epoch)

    @torch.no_grad()
    def with_logits(self, rows: Mapping[str, Tensor], *, tick: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Add the teacher's ``logits`` [N, C] if they never change, as with images that are read unchanged.

        Args:
            rows: A table with ``images`` [N, ch, H, W].
        """
        if not self._cache_logits:
            return dict(rows)
        parts = []
        for part in torch.split(rows["images"], self.recipe.batch_size):
            parts.append(self.teacher(self._inputs(part)))
            tick()
        return {**rows, "logits": torch.cat(parts)}

    def read(self, table: Mapping[str, Tensor], rng: torch.Generator) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Pass once over a table in a random order; yield normalised images [B, ch, H, W] with their rows."""
        recipe = self.recipe
        for rows in shuffled_batches(table, recipe.batch_size, rng, most=recipe.steps_per_epoch):
            yield self._inputs(rows["images"], rng), rows

    def _inputs(self, images: Tensor, rng: torch.Generator | None = None) -> Tensor:
        pixels = dequantize(images.to(self.job.device))
        inputs: Tensor = self.standardize(pixels if rng is None else self._augment(pixels, rng))
        return inputs

    def _lessons(
        self, table: Mapping[str, Tensor], epoch: int, perturb: Perturb | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        rng, recipe = generator(self.job.seed, "distillation", epoch), self.recipe
        steps = self.steps(table)
        length = recipe.steps / steps if recipe.steps else recipe.epochs
        most = min(steps, recipe.steps - epoch * steps) if recipe.steps else steps
        for number, lesson in enumerate(islice(self._taught_groups(table, rng, perturb, most), most)):
            rate = learning_rate(recipe.schedule, recipe.student_lr, epoch + number / steps, length)
            set_rate(self.optimizer, rate)
            yield lesson

    def _taught_groups(
        self, table: Mapping[str, Tensor], rng: torch.Generator, perturb: Perturb | None, most: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch's images and the teacher's answers; a GPU is asked for several batches at once."""
        for rows, sizes in shuffled_groups(table, self.recipe.batch_size, rng, most=most, together=self._together):
            inputs = self._inputs(rows["images"], rng)
            if perturb is not None:
                inputs = perturb(inputs, rng)
            known = rows.get("logits") if perturb is None and self._cache_logits else None
            answers = self._teach(inputs) if known is None else known
            yield from zip(torch.split(inputs, sizes), torch.split(answers, sizes), strict=True)

    @torch.no_grad()
    def member_logits(self, images: Tensor) -> Tensor:
        """Return the clients' logits [N, M, C] on images [N, ch, H, W] that are read unchanged."""
        parts = [self.teacher.member_logits(self._inputs(part)) for part in torch.split(images, self.recipe.batch_size)]
        return torch.cat(parts, dim=1).transpose(0, 1).contiguous()

    @torch.no_grad()
    def _taught(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.teacher(inputs)
        return logits


def image_epoch(
    epoch: int,
    stage: Stage,
    learner: Learner,
    *,
    make: Make,
    remember: Callable[[Batch], Mapping[str, Tensor]],
    progress: Progress,
) -> dict[str, float]:
    """Make the images of an epoch, store them, and distil; return the loss terms of both.

    Args:
        epoch: From 0.
        remember: Stores them, and returns the table that the student learns from.
    """
    tick = stage.ticks(progress, epoch, learner.recipe.epochs)
    with stage.clock("synthesis"):
        batch = make(epoch, tick)
    with stage.clock("distillation"):
        loss = learner.learn(remember(batch), epoch, tick=tick)
    return {**batch.losses, "distillation": loss}


def learn_from_made(
    job: Job,
    progress: Progress,
    stage: Stage,
    learner: Learner,
    *,
    make: Make,
    options: PoolOptions,
) -> Outcome:
    """Run all epochs of a student on the images made so far; the outcome is the last epoch's student."""
    remember = partial(add_to_pool, stage=stage, learner=learner, options=options)
    step = partial(image_epoch, stage=stage, learner=learner, make=make, remember=remember, progress=progress)
    return run_epochs(job, progress, stage, epochs=learner.recipe.epochs, step=step)


def add_to_pool(batch: Batch, stage: Stage, learner: Learner, options: PoolOptions) -> dict[str, Tensor]:
    """Add images to the pool, with the teacher's logits if these never change; return the whole pool."""
    stage.pool.add(**learner.with_logits(options.stored(batch.images, batch.labels)))
    return stage.pool.columns


def learn_from_images(job: Job, progress: Progress, learner: Learner) -> Outcome:
    """Run all epochs of a student on the job's proxy images; the outcome is the last epoch's student.

    Args:
        job: Its proxy images, uint8 [N, ch, H, W], which the method must need (``Need.PROXY_IMAGES``).
        learner: The student and its teacher, which is evaluated before the first epoch if its answers never change.
    """
    assert job.proxy is not None  # noqa: S101  the need is checked before a method starts
    rows = {"images": job.proxy}
    tick = partial(progress.report, 0, learner.recipe.epochs)
    return learn_from_table(job, progress, learner, lambda: learner.with_logits(rows, tick=tick))


def learn_from_table(
    job: Job, progress: Progress, learner: Learner, make: Callable[[], Mapping[str, Tensor]]
) -> Outcome:
    """Run all epochs of a student on a table of images; the outcome is the last epoch's student.

    Args:
        make: Returns the table, see :meth:`Learner.learn`. A resumed run calls it again, so that it must return the
            same table each time.
    """
    epochs = learner.recipe.epochs
    stage = Stage({"student": learner.student}, learner.optimizer, Pool())
    with stage.clock("teacher"):
        table = make()

    def epoch(number: int) -> dict[str, float]:
        tick = stage.ticks(progress, number, epochs, of=learner.steps(table))
        with stage.clock("distillation"):
            return {"distillation": learner.learn(table, number, tick=tick)}

    return run_epochs(job, progress, stage, epochs=epochs, step=epoch)
