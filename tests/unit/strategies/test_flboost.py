"""What FLBoost ends with, starts from and remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flboost_fakes import SHAPE, SMALL, B, C, Rows, Z, differ, job, net, student
from method_fakes import telling

from strategies.distillation.generators import ConditionalGenerator
from strategies.flboost import METHOD
from strategies.method import Job, Silent

# A change here changes every published number.
PINNED = 0.698160


def test_outcome_is_the_model_the_generator_times_and_images() -> None:
    outcome = METHOD.fit(job(), Silent())
    assert student(outcome).keys() == net().state_dict().keys()
    assert outcome.memory.keys() == ConditionalGenerator(Z, C, SHAPE).state_dict().keys()
    assert set(outcome.timings) == {"synthesis", "distillation"}
    assert all(seconds > 0 for seconds in outcome.timings.values())
    assert outcome.images is not None
    assert outcome.images.shape == (B, *SHAPE)
    assert outcome.images.dtype == torch.uint8


def test_uploads_start_and_memory_stay_as_they_are() -> None:
    first = METHOD.fit(job(), Silent())
    given = job(memory=first.memory)
    assert given.start is not None
    states = [upload.read() for upload in given.uploads] + [given.start, first.memory]
    before = [{name: value.clone() for name, value in state.items()} for state in states]
    METHOD.fit(given, Silent())
    assert not any(differ(state, copy) for state, copy in zip(states, before, strict=True))


@pytest.mark.parametrize("step", ["per-client", "joint"])
def test_order_of_uploads_does_not_show(step: str) -> None:
    given = job(replace(SMALL, generator_step=step))
    turned = replace(given, uploads=given.uploads[::-1])
    assert not differ(student(METHOD.fit(given, Silent())), student(METHOD.fit(turned, Silent())))


def test_generator_continues_from_its_memory() -> None:
    first = METHOD.fit(job(), Silent())
    fresh, going_on = (METHOD.fit(job(server_round=2, memory=m), Silent()) for m in (None, first.memory))
    assert differ(student(fresh), student(going_on))
    # With steps near 0 it stays almost unchanged.
    slow = replace(SMALL, generator_lr=1e-12)
    kept = METHOD.fit(job(slow, memory=first.memory, server_round=2), Silent()).memory
    for name, value in first.memory.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-8)
    assert int(kept["norm0.num_batches_tracked"]) == 2 * int(first.memory["norm0.num_batches_tracked"]) == 12


def test_learning_rates_fall_from_round_to_round() -> None:
    config = replace(SMALL, weight_decay=0.0, student_lr=1e-3, generator_lr=1e-4, iterations=1, student_steps=1)
    memory = METHOD.fit(job(), Silent()).memory
    moved = {}
    for decay in (1.0, 0.5):
        given = job(replace(config, lr_decay=decay), memory=memory, server_round=3)
        outcome = METHOD.fit(given, Silent())
        assert given.start is not None
        moved[decay] = [
            float((student(outcome)["6.weight"] - given.start["6.weight"]).norm()),
            float((outcome.memory["pixels.weight"] - memory["pixels.weight"]).norm()),
        ]
    for full, fallen in zip(moved[1.0], moved[0.5], strict=True):
        assert fallen / full == pytest.approx(0.25, rel=0.05)


@pytest.mark.usefixtures("wide_generators")
def test_pinned_value() -> None:
    found = student(METHOD.fit(job(), Silent()))
    assert float(found["6.weight"].abs().mean()) == pytest.approx(PINNED, rel=1e-3)


def mute(given: Job) -> Job:
    return replace(
        given,
        uploads=tuple(telling(upload, label_counts=None) for upload in given.uploads),
    )


@pytest.mark.parametrize("level", ["images", "features"])
def test_model_learns_from_tallys_pool_where_that_is_the_teacher(level: str) -> None:
    given = job(replace(SMALL, level=level), teacher="tally")
    told, again, silent = (METHOD.fit(one, Silent()) for one in (given, given, mute(given)))
    assert not differ(student(told), student(again))
    assert differ(student(told), student(METHOD.fit(replace(given, teacher=None), Silent())))
    assert differ(student(told), student(silent))


def test_generator_of_silent_clients_is_trained_by_estimated_shares() -> None:
    given, rows = mute(job(replace(SMALL, student_lr=1e-9), teacher="tally")), Rows()
    estimated = METHOD.fit(given, rows)
    assert not any("note" in row for row in rows.rows)
    assert differ(estimated.memory, METHOD.fit(replace(given, teacher=None), Silent()).memory)
    # The pool that the model learns from does not reach the generator's own losses: counts from the clients do.
    plain = METHOD.fit(job(replace(SMALL, student_lr=1e-9)), Silent())
    pooled = METHOD.fit(job(replace(SMALL, student_lr=1e-9), teacher="tally"), Silent())
    for name, value in plain.memory.items():
        torch.testing.assert_close(pooled.memory[name], value, rtol=1e-3, atol=1e-4)
