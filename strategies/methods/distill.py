"""Distil: one model learns a teacher of the uploads on stored images, for a given number of steps.

A method of this library, published nowhere else. It is the part that the distilling methods share, without images of
its own. Teacher, images and schedule can be changed one at a time, so that each can be compared.

Symbols: A -> the job's teacher, without one the mean of logits; X -> Job.proxy; S -> steps; T -> kd_temperature.
Where: ``min_f mean_X T^2 KL(sm(A(X) / T) || sm(f(X) / T))`` -> losses.soft_kl; A(X), computed once, and the steps ->
    learner.learn_from_images.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.options import config_class, option
from ..distillation.distill import DistillRecipe
from ..distillation.learner import Learner, build_teacher, learn_from_images
from ..distillation.pool import batch_count
from ..distillation.settings import SCHEDULES, shared
from ..method import ENSEMBLES, Job, Method, Need, Outcome, Progress
from ..teacher.average import average_uploads


@config_class("distill")
class DistillConfig:
    """Options of the distillation; the defaults are those of Tally's student."""

    steps: int = option(2000, "student steps S", low=1, main=True)
    batch_size: int = shared("batch_size", 128)
    kd_temperature: float = shared("kd_temperature", 1.0)
    optimizer: str = option("adam", "optimiser of the student; sgd has momentum 0.9", choices=("adam", "sgd"))
    schedule: str = option("one-cycle", "schedule of the student's learning rate", choices=SCHEDULES)
    student_lr: float = shared("student_lr", 3e-3)
    start: str = option(
        "fresh", "the student before its first step: fresh, or the uploads' average", choices=("fresh", "average")
    )


def fit(job: Job, progress: Progress) -> Outcome:
    """Take S steps on the job's images, as many passes as that needs; the result is the last step's student."""
    config: DistillConfig = job.config
    if config.start == "average" and not job.refines:
        job = replace(job, start=average_uploads(job, "setting 'distill.start' is 'average' and not 'fresh'"))
    assert job.proxy is not None  # noqa: S101  the need is checked before a method starts
    recipe = DistillRecipe(
        epochs=-(-config.steps // batch_count(len(job.proxy), config.batch_size)),
        steps=config.steps,
        batch_size=config.batch_size,
        kd_temperature=config.kd_temperature,
        optimizer=config.optimizer,
        schedule=config.schedule,
        student_lr=config.student_lr,
    )
    return learn_from_images(job, progress, Learner(job, build_teacher(job), recipe))


METHOD = Method(
    name="distill",
    title="Distilled on stored images",
    source="this library",
    config=DistillConfig,
    fit=fit,
    needs=frozenset({Need.PROXY_IMAGES}),
    teachers=ENSEMBLES,
)
