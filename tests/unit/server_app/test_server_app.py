from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fl_app.config import AppConfig
from server_app import app as server_app
from server_app.settings.read import default_settings
from strategies.core.errors import OneShotError, OptionError, QuorumError
from strategies.flower.one_shot import OneShot
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder


class NoGrid:
    """A grid without questions."""


@pytest.fixture
def serve(small: dict[str, Any]) -> Callable[..., None]:
    """Return a function that runs the ServerApp's main as Flower does, without Flower."""

    def run(**settings: Any) -> None:
        given = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
        config = {**default_settings(), **small, **given}
        server_app.main(NoGrid(), Context(1, 1, {}, RecordDict(), config))  # type: ignore[arg-type]

    return run


def never(*_: object, **__: object) -> None:
    raise AssertionError("a client is asked")


def test_wrong_settings_are_refused_before_any_client_is_asked_or_a_folder_is_made(
    serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OneShot, "start", never)
    run_dir = tmp_path / "run"

    for wrong in (
        {"seed": -1},
        {"method": "fedprox"},
        {"method": "fedavg", "model__per_client": "lenet5,mnist-cnn"},
        {"model__student": "cnn5"},
        {"data__partition": "lognormal"},
        {"resume": str(tmp_path), "run_dir": ""},
    ):
        with pytest.raises(OptionError):
            serve(**{"run_dir": str(run_dir), **wrong})

    assert not run_dir.exists()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 6


def test_a_run_that_fails_keeps_its_reason_and_its_folder_for_the_next_try(
    serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: OneShot, *_: object, **__: object) -> None:
        self.folder.round(1).refuse("client-001", "too large")
        self.close()
        raise QuorumError("0 uploads arrived, min-uploads is 2")

    monkeypatch.setattr(OneShot, "start", fail)

    with pytest.raises(QuorumError):
        serve(run_dir=str(tmp_path / "run"))

    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "0 uploads arrived, min-uploads is 2")
    assert result["refusals"][0]["reason"] == "too large"
    RunFolder.open(tmp_path / "run").close()  # its lock is free


def test_a_run_whose_stage_has_begun_when_resumed_asks_no_client_and_ends_with_its_result(
    serve: Callable[..., None], run_folder: Callable[..., Path]
) -> None:
    run = run_folder()
    write_json(run / "stage.json", {"clients": ["client-000", "client-001", "client-002"]})

    serve(resume=str(run), run_dir="")

    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["method"], result["uploads"]) == ("finished", "fedens", 3)
    # What the clients sent before the restart counts.
    assert result["mib_up_per_client"] * 2**20 == pytest.approx(1001, abs=1)
    assert {"server", "app"} <= result["seconds"].keys()


def test_a_run_when_resumed_under_other_settings_is_refused_and_its_folder_let_go(
    serve: Callable[..., None], run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder()
    monkeypatch.setattr(OneShot, "start", never)

    with pytest.raises(OneShotError, match="'data.alpha' is 5.0, but the run to resume began with 0.3"):
        serve(resume=str(run), run_dir="", data__alpha=5.0)

    RunFolder.open(run).close()


def test_the_deadline_is_the_setting(
    serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def note(self: OneShot, grid: object, *, timeout: float, **_: object) -> None:
        seen.append(timeout)
        raise QuorumError("enough")

    monkeypatch.setattr(OneShot, "start", note)

    with pytest.raises(QuorumError):
        serve(run_dir=str(tmp_path / "run"), deadline_s=12.5)

    assert seen == [12.5]
    assert AppConfig().deadline_s == 3600.0
