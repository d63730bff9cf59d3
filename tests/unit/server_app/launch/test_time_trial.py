"""A trial of seconds tells how long a run takes: with a clock of the test's own, to the digit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server_app.launch import dry_run
from server_app.launch.dry_run import trial
from server_app.settings.choices import Choice
from server_app.settings.read import Settings, read_settings
from strategies.core.processor import all_cores
from strategies.method import METHODS, Job, Outcome, Progress
from strategies.run import trial as stage_trial

QUICK = {"device": "cpu", "client.epochs": 4}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The processor's time, which only the test moves."""
    now = [0.0]
    for module in (dry_run, stage_trial):
        monkeypatch.setattr(module, "process_time", lambda: now[0])
    return now


def settings_with(monkeypatch: pytest.MonkeyPatch, fit: Callable[[Job, Progress], Outcome], **more: Any) -> Settings:
    """Return settings of a method with another server stage; its clients take a second."""
    monkeypatch.setattr(dry_run, "_clients", lambda *_: 1.0)
    settings = read_settings({**QUICK, "method": "dense", **more})
    return replace(settings, choice=Choice.of(replace(METHODS["dense"], fit=fit)))


def test_time_of_clients_is_that_of_a_step_for_all_their_steps_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(dry_run, "process_time", lambda: next(ticks) * 0.125)

    found = [
        trial(read_settings({**QUICK, "method": "fens", **more}), clients)["clients"]
        for more, clients in (({}, 4), ({"client.epochs": 12}, 4), ({"client.steps": 50}, 4), ({}, 1))
    ]

    # Five passes of four batches take seven ticks; 1,297 digits of four clients are 11 batches of 32 each.
    step = 7 * 0.125 / (5 * 4)
    at_once = min(all_cores(), 4)
    assert found[0] == pytest.approx(4 * 4 * 11 * step / at_once, rel=0.05)
    assert found[1] == pytest.approx(3 * found[0])
    assert found[2] == pytest.approx(4 * 50 * step / at_once)
    assert found[3] == pytest.approx(4 * 41 * step, rel=0.05)


def test_time_of_a_stage_is_reckoned_from_its_first_steps(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    seen: list[Job] = []

    def fit(job: Job, progress: Progress) -> Outcome:
        seen.append(job)
        for step in itertools.count():
            clock[0] += 0.5
            progress.report(0, 12, None, (step, 100))
        raise AssertionError

    found = trial(settings_with(monkeypatch, fit), 3)

    assert found == {"clients": 1.0, "server": pytest.approx(12 * 100 * 0.5, rel=0.01)}
    (job,) = seen
    assert clock[0] == 3.0
    assert job.threads == 1
    assert [upload.facts.client for upload in job.uploads] == ["client-000", "client-001", "client-002"]
    assert [upload.facts.num_examples for upload in job.uploads] == [1297 // 3] * 3
    assert all(upload.read().keys() == job.builders["lenet5"]().state_dict().keys() for upload in job.uploads)
