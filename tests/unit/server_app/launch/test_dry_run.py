"""A dry run tells settings, bytes and time with their basis, by a trial of seconds, and starts nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import oneshot

from server_app.launch import dry_run, superlink
from server_app.launch.dry_run import trial
from server_app.settings.choices import Choice
from server_app.settings.read import Settings, default_settings, read_settings
from strategies.core.processor import all_cores
from strategies.method import METHODS, Job, Outcome, Progress
from strategies.run import trial as stage_trial
from strategies.run.run_folder import RunFolder


def planned(*words: str) -> dict[str, Any]:
    ended = oneshot("run", "--dry-run", "--format", "json", *words)
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(superlink, "launch", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(dry_run, "trial", lambda *_: {})
    monkeypatch.chdir(tmp_path)


def test_dry_run_tells_setting_changes_and_bytes_and_makes_no_folder(tmp_path: Path) -> None:
    found = planned("--set", "client.epochs=7", "--clients", "4")

    assert found["setting"] == "digits · split dirichlet-classes, alpha 0.3 · 4 clients · seed 0"
    assert found["changed"] == {"client.epochs": 7}
    assert found["mib_up_per_client"] == pytest.approx(44_426 * 4 / 2**20, rel=1e-3)  # the weights of a LeNet-5
    assert found["seconds"] is None
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_the_mean_of_the_clients_models_not_of_the_named_architectures() -> None:
    small, large = (planned("--set", f"model.name={name}")["mib_up_per_client"] for name in ("lenet5", "resnet8-ds"))
    mixed = ["--set", "model.per-client=lenet5,resnet8-ds model.student=lenet5", "--clients"]

    assert planned(*mixed, "3")["mib_up_per_client"] == pytest.approx((2 * small + large) / 3, abs=1e-5)


def test_rounds_cost_a_model_each_way_in_every_round() -> None:
    once, rounds = planned(), planned("--method", "iterative", "--set", "iterative.rounds=10")

    assert rounds["mib_up_per_client"] == rounds["mib_down_per_client"]
    assert rounds["mib_up_per_client"] == pytest.approx(10 * once["mib_up_per_client"], rel=1e-3)


def test_stored_uploads_cost_no_bytes(tmp_path: Path) -> None:
    settings = {**default_settings(), "method": "fens"}
    with RunFolder.create(tmp_path / "runs" / "a", {"settings": settings, "num-supernodes": 5}) as folder:
        folder.write_result({"status": "finished"})

    found = planned("--set", "method=fens uploads=latest")

    assert (found["mib_up_per_client"], found["mib_down_per_client"]) == (0.0, 0.0)
    assert found["bytes_basis"] == "the uploads are stored; the method asks again, which is not counted"


def test_time_is_that_of_a_trial_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "trial", lambda *_: {"clients": 61.24, "server": 3.0})
    line = (
        "time         about 1 min 4 s (clients 1 min 1 s, server 3 s), by a trial of seconds on one thread; without the"
    )
    assert line in oneshot("run", "--dry-run").stdout

    monkeypatch.setattr(dry_run, "trial", lambda *_: {"clients": 61.24})
    assert "; without the server stage, the start of all processes" in planned()["time_basis"]


def test_dry_run_of_a_wrong_setting_is_refused() -> None:
    ended = oneshot("run", "--dry-run", "--clients", "1")

    assert ended.exit_code == 1
    assert "'min-uploads' is 2: must be at most 1" in ended.stderr


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
