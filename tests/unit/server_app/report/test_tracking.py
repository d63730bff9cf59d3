"""Experiment trackers: TensorBoard's files read back; of the others, which calls reach their packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from commands import MakeRun, replayed

from fl_app.config import TRACKERS
from server_app.report import tracking
from server_app.report.tracking import track
from server_app.settings.checks import check_tracker
from strategies.core.errors import OptionError

METRICS = [
    {"epoch": 1, "distillation": 0.5, "accuracy": 40.0, "note": "a text", "best": True, "digest": "ab"},
    {"epoch": 2, "distillation": 0.25, "accuracy": 50.0},
]
RESULT = {"accuracy": 50.0, "table": [{"name": "FedAvg (one shot)", "kind": "baseline", "accuracy": 30.0}]}
SETTINGS = {"method": "tally", "seed": 0}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # track() sets variables


def tracked(name: str, folder: Path) -> str:
    lines: list[str] = []
    track(name, folder, METRICS, RESULT, SETTINGS, log=lines.append)
    return "\n".join(lines)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_the_metrics_the_table_and_the_settings(tmp_path: Path) -> None:
    assert tracked("tensorboard", tmp_path) == f"tracker tensorboard: {tmp_path / 'tensorboard'}"

    found = events(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in found.Scalars("distillation")] == [(1, 0.5), (2, 0.25)]
    assert [e.value for e in found.Scalars("result/table/FedAvg (one shot)")] == [30.0]
    assert [e.value for e in found.Scalars("result/accuracy")] == [50.0]
    assert "method = 'tally'" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MagicMock:
    """A package that records every call and its arguments."""
    monkeypatch.setitem(sys.modules, request.param, found := MagicMock())
    return found


@pytest.mark.parametrize("package", ["mlflow"], indirect=True)
def test_mlflow_gets_a_run_in_files_beside_the_run_folders(package: MagicMock, tmp_path: Path) -> None:
    client = package.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "r1"

    tracked("mlflow", tmp_path / "run")

    package.MlflowClient.assert_called_once_with(tracking_uri=(tmp_path / "mlruns").as_uri())
    client.create_run.assert_called_once_with(client.create_experiment.return_value, run_name="run")
    client.log_param.assert_any_call("r1", "method", "tally")
    client.log_metric.assert_any_call("r1", "distillation", 0.25, step=2)
    client.log_metric.assert_any_call("r1", "result/table/FedAvg _one shot_", 30.0)
    assert client.method_calls[-1] == call.set_terminated("r1")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_wandb_gets_an_offline_run_in_the_run_folder(package: MagicMock, tmp_path: Path) -> None:
    run = package.init.return_value
    run.summary = {}

    tracked("wandb", tmp_path)

    given = package.init.call_args.kwargs
    assert (given["mode"], given["dir"], given["config"]) == ("offline", str(tmp_path), SETTINGS)
    run.log.assert_any_call({"distillation": 0.25, "accuracy": 50.0, "step": 2})
    assert run.method_calls[-1] == call.finish()
    assert run.summary == {"result/accuracy": 50.0, "result/table/FedAvg (one shot)": 30.0}
    assert os.environ["WANDB_MODE"] == "offline"


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_a_tracker_that_fails_is_one_line_and_no_failure(package: MagicMock, tmp_path: Path) -> None:
    package.init.side_effect = RuntimeError("no room\nfor a run")

    assert tracked("wandb", tmp_path) == "tracker wandb: not written, RuntimeError: no room for a run"
    assert tracked("none", tmp_path) == ""


def test_a_tracker_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch, run_folder: MakeRun) -> None:
    assert tracking._WRITERS.keys() == set(TRACKERS[1:])
    check_tracker("none")
    run = run_folder()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    line = r"'tracker' is 'wandb', which is not installed: pip install 'oneshot-fl\[wandb\]'"
    with pytest.raises(OptionError, match=line):
        replayed(run, "fedavg", tracker="wandb")
