"""What a deployed run leaves for its operator when it is cut off: a file with its settings, and one line."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.run import RunNotRunningException

from fl_app.node_config import SUPERNODES_VARIABLE
from server_app import app as server_app
from server_app.launch.run_command import RESUME_FILE, leave_resume_file
from server_app.settings.catalogue import merge_settings
from server_app.settings.checks import check_same_run, free_on
from server_app.settings.read import default_settings
from strategies.core.errors import ComputeError, OptionError, QuorumError, StoreError
from strategies.flower.one_shot import OneShot
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder


@pytest.fixture
def serve(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs the ServerApp's main as a deployment does."""
    monkeypatch.delenv(SUPERNODES_VARIABLE, raising=False)

    def run(**settings: Any) -> None:
        config = {**default_settings(), **small, **{key.replace("_", "-"): value for key, value in settings.items()}}
        server_app.main(object(), Context(1, 1, {}, RecordDict(), config))  # type: ignore[arg-type]

    return run


def raising(error: BaseException) -> Callable[..., None]:
    def start(self: OneShot, *_: object, **__: object) -> None:
        raise error

    return start


def test_a_run_that_fails_says_in_one_line_why_and_how_it_goes_on(
    serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(OneShot, "start", raising(QuorumError("0 uploads arrived.")))
    with pytest.raises(QuorumError):
        serve(run_dir=str(run), seed=7)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    command = f"flwr run APP SUPERLINK --run-config {run}/resume.toml"
    assert line == f"0 uploads arrived. To resume: {command}"
    assert f"if this run is interrupted, resume it with: {command}" in caplog.messages


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


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), RunNotRunningException()])
def test_a_run_that_flower_ends_notes_how_it_goes_on_and_lets_its_folder_go(
    serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(OneShot, "start", raising(error))
    with pytest.raises((SystemExit, KeyboardInterrupt, ComputeError)):
        serve(run_dir=str(run))
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"].startswith(
        "the run was stopped, or its SuperLink is gone; the received uploads are kept. To resume: flwr"
    )
    RunFolder.open(run).close()


def test_a_disk_that_is_full_at_the_end_is_one_line_and_the_run_goes_on_when_there_is_space(
    serve: Callable[..., None], run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = run_folder()
    write_json(run / "stage.json", {"clients": ["client-000", "client-001", "client-002"]})
    with monkeypatch.context() as disk:
        for name in ("server_app.report.finish.atomic_write", "strategies.run.files.atomic_write"):
            disk.setattr(name, full)
        with pytest.raises(StoreError, match=r"No space left on device"):
            serve(resume=str(run), run_dir="")
    serve(resume=str(run), run_dir="")
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
