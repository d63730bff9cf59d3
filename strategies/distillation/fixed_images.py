"""The server stage on images that stay the same, real ones of the server or noise: one pass over them per epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from .epochs import Stage, run_epochs
from .pool import Pool

if TYPE_CHECKING:
    from ..method import Job, Outcome, Progress
    from .learner import Learner


def learn_from_images(job: Job, progress: Progress, learner: Learner) -> Outcome:
    """Run all epochs of a student on the job's proxy images; the outcome is the last epoch's student.

    Args:
        job: Its proxy images, uint8 [N, ch, H, W], which the method must need (``Need.PROXY_IMAGES``).
        progress: Told after each step; gives the epoch to go on from.
        learner: The student and its teacher, who is asked before the first epoch where its answers stay the same.
    """
    assert job.proxy is not None  # noqa: S101  the need is checked before a method starts
    rows = {"images": job.proxy}
    tick = partial(progress.report, 0, learner.options.epochs)
    return learn_from_table(job, progress, learner, lambda: learner.with_logits(rows, tick=tick))


def learn_from_table(
    job: Job, progress: Progress, learner: Learner, make: Callable[[], Mapping[str, Tensor]]
) -> Outcome:
    """Run all epochs of a student on a table of images; the outcome is the last epoch's student.

    Args:
        job: Gives the seed and the observer.
        progress: Told after each step; gives the epoch to go on from.
        learner: The student and its teacher.
        make: Returns the table, see :meth:`.learner.Learner.learn`; called once, and again by a run that goes on, so
            that it must return the same each time.
    """
    epochs = learner.options.epochs
    stage = Stage({"student": learner.student}, learner.optimizer, Pool())
    with stage.clock("teacher"):
        table = make()

    def epoch(number: int) -> dict[str, float]:
        with stage.clock("distillation"):
            return {"distillation": learner.learn(table, number, tick=partial(progress.report, number, epochs))}

    return run_epochs(job, progress, stage, epochs=epochs, step=epoch)
