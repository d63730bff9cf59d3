"""The environment of a run's processes, and the GPUs of its clients."""

from __future__ import annotations

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
from server_app.launch.superlink import gpu_share, run_environment
from strategies.core import offline

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def test_run_environment_switches_off_telemetry_whatever_the_caller_s_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in offline.QUIET:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(offline.VARIABLE, raising=False)

    made = run_environment(tmp_path, "token")

    assert made.items() >= offline.QUIET.items()
    assert made[LOOPBACK] == "0"


def test_the_app_is_packed_without_run_folders_and_folders_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run there may be removed meanwhile, and Flower takes no more than 10 MB.
    for name in ("mine", "runs/done/report", "closed"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "facts.json").write_text("{}")
    (tmp_path / "runs" / "done" / "run.json").write_text("{}")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and allowed(path, mode))

    assert {str(path.relative_to(tmp_path)) for path in shipped_files(tmp_path)} == {"mine/facts.json"}


def test_run_environment_finds_modules_on_a_relative_path_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/elsewhere"]))

    found = run_environment(tmp_path / "run", "token")["PYTHONPATH"].split(os.pathsep)

    assert found == [str(tmp_path / "src"), "/elsewhere"]


def test_run_environment_off_the_network_has_a_proxy_that_nobody_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(offline.VARIABLE, "1")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")

    made = run_environment(tmp_path, "token")

    assert made["https_proxy"] == "http://127.0.0.1:9"
    assert "127.0.0.1" in made["no_proxy"]


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
