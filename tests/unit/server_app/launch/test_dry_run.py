"""A dry run tells settings, bytes and time with their basis, and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import oneshot

from server_app.launch import dry_run, superlink
from server_app.settings.read import default_settings
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
