"""The student's initial weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from torch import nn

    from ..method import Job


def fresh_student(job: Job) -> nn.Module:
    """Return the student before its first step: the job's start weights, else a seeded initialisation."""
    with seeded_torch(job.seed, "student"):
        model = job.builders[job.student]()
    if job.start is not None:
        model.load_state_dict(job.start)
    return model.to(job.device)
