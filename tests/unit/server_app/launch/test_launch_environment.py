"""The environment of a run's processes, the GPUs of its clients, and how its processes ended."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fl_app.environment import RUN_VARIABLE
from fl_app.node_config import SUPERNODES_VARIABLE
from server_app.launch.control import shipped_files
from server_app.launch.simulation import _without_collections
from server_app.launch.superlink import Runtime, gpu_share, run_environment
from strategies.core import offline


@pytest.mark.parametrize(
    ("given", "wanted", "gone"),
    [
        (dict.fromkeys(offline.QUIET, "1"), {**offline.QUIET, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}, ""),
        ({"RAY_ADDRESS": "198.51.100.1:6379"}, {"RAY_AUTH_MODE": "token"}, "RAY_ADDRESS"),  # it joins no cluster
        # Off the network it has a proxy that nobody serves.
        (
            {offline.VARIABLE: "1", "https_proxy": "http://proxy.example:3128"},
            {"https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1,localhost,::1"}, "",
        ),
    ],
)  # fmt: skip
def test_run_environment_is_quiet_and_of_this_machine_alone_whatever_the_caller_s_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], wanted: dict[str, str], gone: str
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", offline.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    made = run_environment(tmp_path, "token")

    assert made.items() >= wanted.items()
    assert gone not in made


def test_the_app_is_packed_without_run_folders_and_closed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run there may be removed meanwhile, and Flower takes no more than 10 MB.
    for name in ("mine", "runs/done/report", "closed"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "facts.json").write_text("{}")
    (tmp_path / "runs" / "done" / "run.json").write_text("{}")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and allowed(path, mode))

    assert {str(path.relative_to(tmp_path)) for path in shipped_files(tmp_path)} == {"mine/facts.json"}


def test_run_environment_finds_modules_on_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/elsewhere"]))

    found = run_environment(tmp_path / "run", "token")["PYTHONPATH"].split(os.pathsep)

    assert found == [str(tmp_path / "src"), "/elsewhere"]


@pytest.mark.parametrize(("device", "gpus"), [("auto", 2), ("cpu", 2), ("cuda", 0)])
def test_simulated_clients_have_no_share_of_a_gpu_unless_the_settings_name_one(
    device: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert gpu_share(device, 3) == 0.0


def test_a_process_that_starts_before_the_run_is_known_finds_its_variables_when_it_imports_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SUPERNODES_VARIABLE, raising=False)
    made = {**run_environment(tmp_path, "token"), "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
    Path(made[RUN_VARIABLE]).write_text(json.dumps({SUPERNODES_VARIABLE: "3"}))

    script = f"import client_app, os; print(os.environ['{SUPERNODES_VARIABLE}'])"
    said = subprocess.run(
        [sys.executable, "-P", "-c", script], env=made, cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert said.stdout.strip() == "3"


RUNS, DIES = "sleep 60", "kill -{} $$"


@pytest.mark.skipif(sys.platform != "linux", reason="the words for signals are the system's")
@pytest.mark.parametrize(
    ("simulation", "superlink", "said"),
    [
        (DIES.format(9), RUNS, "the simulation's process was killed, by hand or for lack of memory"),
        (DIES.format(15), RUNS, "the simulation's process ended with signal 15 (Terminated): last | line"),
        (DIES.format(36), RUNS, "the simulation's process ended with signal 36 (Real-time signal 2): last | line"),
        ("exit 3", "exit 4", "the simulation's process ended with status 3: last | line"),
        (RUNS, "exit 4", "Flower's SuperLink ended with status 4: last | line"),
        (RUNS, DIES.format(9), "Flower's SuperLink was killed, by hand or for lack of memory"),
    ],
)
def test_the_process_that_has_ended_is_named_with_its_status(
    tmp_path: Path, simulation: str, superlink: str, said: str
) -> None:
    with contextlib.ExitStack() as stack:
        runtime, started = Runtime(tmp_path, stack.close), []
        for command in (simulation, superlink):
            process = subprocess.Popen(["bash", "-c", f"{'exec ' * (command == RUNS)}{command}"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
            if command != RUNS:
                process.wait()
        runtime.simulation, runtime.superlink = started
        assert runtime.death(["last", "line"]) == said


def test_garbage_is_collected_again_after_imports_that_fail() -> None:
    seen = list[bool]()

    def fail() -> None:
        seen.append(gc.isenabled())
        raise ImportError

    with pytest.raises(ImportError), _without_collections():
        fail()
    assert (seen, gc.isenabled()) == ([False], True)
