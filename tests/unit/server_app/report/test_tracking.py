"""Experiment trackers: TensorBoard's files read back; of the others, which calls reach their packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from commands import replayed

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


class Recorder:
    """A package that records every call and its arguments."""

    def __init__(self, calls: list[tuple[Any, ...]], **answers: Any) -> None:
        self._calls, self._answers = calls, answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            self._calls.append((name, *args, *given.items()))
            return self._answers.get(name)

        return call


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    module = ModuleType(name)
    vars(module).update(parts)
    monkeypatch.setitem(sys.modules, name, module)


def test_mlflow_gets_a_run_in_files_beside_the_run_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def client(tracking_uri: str) -> Recorder:
        calls.append(("client", tracking_uri))
        return Recorder(calls, create_experiment="e1", create_run=run)

    fake(monkeypatch, "mlflow", MlflowClient=client)

    tracked("mlflow", tmp_path / "run")

    assert calls[0] == ("client", (tmp_path / "mlruns").as_uri())
    assert ("create_run", "e1", ("run_name", "run")) in calls
    assert ("log_param", "r1", "method", "tally") in calls
    assert ("log_metric", "r1", "distillation", 0.25, ("step", 2)) in calls
    assert ("log_metric", "r1", "result/table/FedAvg _one shot_", 30.0) in calls
    assert calls[-1] == ("set_terminated", "r1")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_wandb_gets_an_offline_run_in_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    run = Recorder(calls)
    run.summary = {}  # type: ignore[attr-defined]

    def init(**given: Any) -> Recorder:
        calls.append(("init", given))
        return run

    fake(monkeypatch, "wandb", init=init)

    tracked("wandb", tmp_path)

    (_, given), *others = calls
    assert (given["mode"], given["dir"], given["config"]) == ("offline", str(tmp_path), SETTINGS)
    assert ("log", {"distillation": 0.25, "accuracy": 50.0, "step": 2}) in others
    assert others[-1] == ("finish",)
    assert run.summary == {"result/accuracy": 50.0, "result/table/FedAvg (one shot)": 30.0}  # type: ignore[attr-defined]
    assert os.environ["WANDB_MODE"] == "offline"


def test_a_tracker_that_fails_is_one_line_and_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("no room\nfor a run")

    fake(monkeypatch, "wandb", init=init)

    assert tracked("wandb", tmp_path) == "tracker wandb: not written, RuntimeError: no room for a run"
    assert tracked("none", tmp_path) == ""


def test_a_tracker_without_its_package_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, run_folder: Callable[..., Path]
) -> None:
    assert tracking._WRITERS.keys() == set(TRACKERS[1:])
    check_tracker("none")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(
        OptionError, match=r"'tracker' is 'wandb', which is not installed: pip install 'oneshot-fl\[wandb\]'"
    ):
        replayed(run_folder(), "fedavg", tracker="wandb")
