"""The student before its first step, and its scores during training, which change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..core.layout import evaluating, fast_layout
from ..core.seeds import initial_torch, seeded_torch
from ..core.work import Work, count_work
from ..method import Job


def fresh_student(job: Job) -> nn.Module:
    """Return the student before its first step: the job's start weights, else a seeded initialisation."""
    with seeded_torch(job.seed, "student"):
        model = job.builders[job.student]()
    if job.start is not None:
        model.load_state_dict(job.start)
    return model.to(job.device)


def start_model(job: Job) -> nn.Module:
    """Return the model that the clients started from: of their server, or the fresh one of this app's clients."""
    model = draw_start(job, job.clients_seed or 0)
    if job.start is not None:
        model.load_state_dict(job.start)
    return model


def draw_start(job: Job, seed: int) -> nn.Module:
    """Return a model of the student's architecture with the fresh weights of this app's clients."""
    with initial_torch(seed, job.student):
        return job.builders[job.student]()


def fast_student(job: Job) -> nn.Module:
    """Return :func:`fresh_student` in the layout of :func:`.core.layout.fast_layout`, if it takes images in it."""
    student = fresh_student(job)
    return fast_layout(student, torch.zeros(2, *job.input_shape, device=job.device))


def observe(job: Job, epoch: int, module: nn.Module) -> dict[str, float]:
    """Return the observer's scores, without changing the module's mode or torch's random state."""
    if job.observer is None:
        return {}
    with seeded_torch(job.seed, "observer", epoch), frozen(module), torch.no_grad(), count_work(Work()):
        return dict(job.observer(epoch, module))


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Hold a module in eval mode and without gradients of its weights during a block; restore both afterwards."""
    wanted = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    module.requires_grad_(False)
    try:
        with evaluating(module):
            yield
    finally:
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)
