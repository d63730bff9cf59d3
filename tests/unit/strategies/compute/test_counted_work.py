"""The counts of a server stage are those by hand, also after a resumption; other work does not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flboost_fakes import SMALL, job
from method_fakes import Book
from torch import nn

from strategies.combiners.combiners import Mean
from strategies.compute.in_process import InProcess
from strategies.core.work import KEY, Work, count_work, work
from strategies.method import Job, Silent
from strategies.methods.dense import METHOD as DENSE
from strategies.methods.dense import DenseConfig
from strategies.methods.flboost import METHOD as FLBOOST
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.student import observe

MEMBERS, IMAGES, BATCH, EPOCHS, STEPS = 3, 8, 4, 3, 2


def dense_job(epochs: int = EPOCHS) -> Job:
    config = DenseConfig(
        epochs=epochs, generator_steps=STEPS, synthesis_batch_size=IMAGES, batch_size=BATCH, latent=5, bn_weight=0.0,
        generator_precision="float32",
    )  # fmt: skip
    return job(config)  # type: ignore[arg-type]


def by_hand(epochs: int) -> dict[str, int]:
    """Of DENSE: two generator steps on 8 images, their answers once, then passes over a pool that grows by 8."""
    student = sum(IMAGES * (epoch + 1) // BATCH for epoch in range(epochs))
    forward = epochs * (STEPS * IMAGES + IMAGES) * MEMBERS
    return {
        "teacher_forward": forward, "teacher_backward": epochs * STEPS * IMAGES * MEMBERS, "student_steps": student,
        "generator_steps": epochs * STEPS, "bfloat16_passes": 0, "bfloat16_steps": 0, "exchanges": 0,
    }  # fmt: skip


def test_counts_of_dense_are_those_by_hand() -> None:
    assert InProcess().run(DENSE, dense_job(), Silent()).work == by_hand(EPOCHS)


@pytest.mark.parametrize(("step", "precision"), [("per-client", "float32"), ("joint", "bfloat16")])
def test_counts_of_flboost_are_those_by_hand(step: str, precision: str) -> None:
    config = replace(SMALL, generator_step=step, generator_precision=precision)

    found = InProcess().run(FLBOOST, job(config), Silent()).work

    steps = config.iterations * (MEMBERS if step == "per-client" else 1)
    seen = config.iterations * config.batch_size * MEMBERS
    assert found == {
        "teacher_forward": 2 * seen, "teacher_backward": seen, "student_steps": config.iterations * 5,
        "generator_steps": steps, "bfloat16_passes": 0,
        "bfloat16_steps": steps if precision == "bfloat16" else 0, "exchanges": 0,
    }  # fmt: skip


def test_resumed_stage_has_the_counts_of_an_uninterrupted_one() -> None:
    first = Book(keep=True)
    whole = InProcess().run(DENSE, dense_job(), first)
    resumed = InProcess().run(DENSE, dense_job(), Book(first.snapshots[1]))

    assert first.snapshots[1].state[KEY] == by_hand(2)
    assert resumed.work == whole.work


def test_observer_s_passes_do_not_count_and_neither_does_work_outside_of_a_stage() -> None:
    one, member = job(), nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    ensemble = Ensemble([member], Mean())
    images = torch.zeros(3, *one.input_shape)
    watched = replace(one, observer=lambda epoch, model: {"sum": float(model(images).sum())})

    with count_work(Work()) as counts:
        observe(watched, 1, ensemble)
    ensemble(images)

    assert counts == Work()
    assert work() == Work()
    assert work() is not work()
