"""The ServerApp's main without Flower: what it refuses, and how a run ends, is cut off and goes on."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import MakeRun, named
from flwr.app import Context, RecordDict
from flwr.supercore.run import RunNotRunningException

from fl_app.config import AppConfig
from fl_app.node_config import SUPERNODES_VARIABLE
from server_app import app as server_app
from server_app.launch.run_command import RESUME_FILE, leave_resume_file
from server_app.settings.catalogue import merge_settings
from server_app.settings.checks import check_same_run, free_on
from server_app.settings.read import default_settings
from strategies.core.durable import read_json
from strategies.core.errors import ComputeError, OneShotError, OptionError, QuorumError, StoreError
from strategies.flower.one_shot import OneShot
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder

Serve = Callable[..., None]


@pytest.fixture
def serve(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Return a function that runs the ServerApp's main as a deployment does, with no grid to ask clients by.

    A function ``start`` stands for the start of the strategy.
    """
    monkeypatch.delenv(SUPERNODES_VARIABLE, raising=False)

    def run(start: Callable[..., None] | None = None, **settings: Any) -> None:
        config = {**default_settings(), **small, **named(settings)}
        with monkeypatch.context() as patched:
            if start is not None:
                patched.setattr(OneShot, "start", start)
            server_app.main(object(), Context(1, 1, {}, RecordDict(), config))  # type: ignore[arg-type]

    return run


def raising(error: BaseException) -> Callable[..., None]:
    def start(self: OneShot, *_: object, **__: object) -> None:
        self.folder.round(1).refuse("client-001", "too large")
        raise error

    return start


def never(*_: object, **__: object) -> None:
    raise AssertionError("a client is asked")


def test_wrong_settings_are_refused_before_any_client_is_asked_or_a_folder_is_made(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
            serve(never, **{"run_dir": str(run_dir), **wrong})

    assert not run_dir.exists()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 6


def test_a_run_that_fails_says_why_and_how_it_goes_on_and_keeps_its_folder_for_the_next_try(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"

    with pytest.raises(QuorumError):
        serve(raising(QuorumError("0 uploads arrived.")), run_dir=str(run))

    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    command = f"flwr run APP SUPERLINK --run-config {run}/resume.toml"
    assert line == f"0 uploads arrived. To resume: {command}"
    assert f"if this run is interrupted, resume it with: {command}" in caplog.messages
    result = read_json(run / "result.json")
    assert (result["status"], result["error"]) == ("failed", "0 uploads arrived.")
    assert result["refusals"][0]["reason"] == "too large"
    RunFolder.open(run).close()  # its lock is free


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), RunNotRunningException()])
def test_a_run_that_flower_ends_lets_its_folder_go(serve: Serve, tmp_path: Path, error: BaseException) -> None:
    run = tmp_path / "run"
    with pytest.raises((SystemExit, KeyboardInterrupt, ComputeError)):
        serve(raising(error), run_dir=str(run))
    result = read_json(run / "result.json")
    assert result["status"] == "failed"
    assert result["error"].startswith(
        "the run was stopped, or its SuperLink is gone; the received uploads are kept. To resume: flwr"
    )
    RunFolder.open(run).close()


def test_a_flipped_bit_in_the_file_is_a_refusal_or_changes_no_setting_of_the_result(tmp_path: Path) -> None:
    begun = {**default_settings(), "method": "dense", "seed": 7, "data.alpha": 0.1}
    leave_resume_file(tmp_path, begun)
    good, kinds = (tmp_path / RESUME_FILE).read_bytes(), {key: type(value) for key, value in begun.items()}
    rng, lines = random.Random(0), list[str]()
    for _ in range(40):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / RESUME_FILE).write_bytes(data)
        try:
            found = {**default_settings(), **merge_settings([str(tmp_path / RESUME_FILE)], kinds)}
            check_same_run({"settings": begun}, found)
        except OptionError as error:
            lines.append(str(error))
        else:
            assert {key for key in begun if found[key] != begun[key]} <= free_on("resume")
    assert len(lines) > 25
    assert not any("\n" in line for line in lines)


@pytest.fixture
def begun(run_folder: MakeRun) -> Path:
    """Return the folder of a run whose stage has begun, and which asks no client again."""
    run = run_folder()
    write_json(run / "stage.json", {"clients": ["client-000", "client-001", "client-002"]})
    return run


def test_a_disk_that_is_full_at_the_end_is_one_line_and_the_run_ends_with_its_result_when_there_is_space(
    serve: Serve, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        for name in ("server_app.report.finish.atomic_write", "strategies.run.files.atomic_write"):
            disk.setattr(name, full)
        with pytest.raises(StoreError, match=r"No space left on device"):
            serve(resume=str(begun), run_dir="")
    serve(resume=str(begun), run_dir="")

    result = read_json(begun / "result.json")
    assert (result["status"], result["method"], result["uploads"]) == ("finished", "fedens", 3)
    # What the clients sent before the restart counts.
    assert result["mib_up_per_client"] * 2**20 == pytest.approx(1001, abs=1)
    assert {"server", "app"} <= result["seconds"].keys()


def test_a_run_when_resumed_under_other_settings_is_refused_and_its_folder_let_go(serve: Serve, begun: Path) -> None:
    with pytest.raises(OneShotError, match="'data.alpha' is 5.0, but the run to resume began with 0.3"):
        serve(never, resume=str(begun), run_dir="", data__alpha=5.0)

    RunFolder.open(begun).close()


def test_the_deadline_is_the_setting(serve: Serve, tmp_path: Path) -> None:
    seen: list[float] = []

    def note(self: OneShot, grid: object, *, timeout: float, **_: object) -> None:
        seen.append(timeout)
        raise QuorumError("enough")

    with pytest.raises(QuorumError):
        serve(note, run_dir=str(tmp_path / "run"), deadline_s=12.5)

    assert seen == [12.5]
    assert AppConfig().deadline_s == 3600.0
