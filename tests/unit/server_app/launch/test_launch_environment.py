"""The environment of a run's processes, and the GPUs of its clients."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from fl_app.project import FOLDER_VARIABLE
from server_app.launch import superlink
from server_app.launch.environment import REFUSALS, gpu_share, run_environment
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
    assert (made[LOOPBACK], made[offline.LOG_VARIABLE]) == ("0", str(tmp_path / REFUSALS))
    assert str(offline.STARTUP) not in made.get("PYTHONPATH", "")


def test_the_app_starts_from_a_copy_without_run_folders_and_folders_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run there may be removed meanwhile, and Flower takes no more than 10 MB.
    for name in ("mine", "runs/done/report", "closed"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "facts.json").write_text("{}")
    (tmp_path / "runs" / "done" / "run.json").write_text("{}")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and allowed(path, mode))

    shutil.copytree(tmp_path, tmp_path / ".copy", ignore=superlink._not_shipped)

    copied = {str(path.relative_to(tmp_path / ".copy")) for path in (tmp_path / ".copy").rglob("*")}
    assert copied == {"mine", "mine/facts.json", "runs"}


def test_run_environment_names_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)

    assert run_environment(tmp_path / "run", "token")[FOLDER_VARIABLE] == str(tmp_path)


@pytest.mark.parametrize("guarded", ["", "1"])
def test_run_environment_finds_modules_on_a_relative_path_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(offline.VARIABLE, guarded)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/elsewhere"]))

    found = run_environment(tmp_path / "run", "token")["PYTHONPATH"].split(os.pathsep)

    assert found[-2:] == [str(tmp_path / "src"), "/elsewhere"]
    assert len(found) == 2 + bool(guarded)


def test_run_environment_off_the_network_guards_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offline.VARIABLE, "1")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")

    made = run_environment(tmp_path, "token")

    assert made["PYTHONPATH"].split(os.pathsep)[0] == str(offline.STARTUP)
    assert made["https_proxy"] == ""


def test_run_environment_with_a_cluster_leaves_ray_s_addresses_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")

    assert LOOPBACK not in {**run_environment(tmp_path, "token")}.keys() - os.environ.keys()


def test_run_environment_gives_each_ray_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    one, other = (run_environment(tmp_path, "token") for _ in range(2))

    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("own", [{"RAY_ADDRESS": "ray.example.org:6379"}, {"RAY_AUTH_MODE": "disabled"}])
def test_run_environment_leaves_a_cluster_and_a_mode_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)

    made = run_environment(tmp_path, "token")

    assert made.get("RAY_AUTH_MODE") == own.get("RAY_AUTH_MODE")
    assert "RAY_AUTH_TOKEN" not in made


@pytest.mark.parametrize(("device", "gpus"), [("auto", 2), ("cpu", 2), ("cuda", 0)])
def test_simulated_clients_have_no_share_of_a_gpu_unless_the_settings_name_one(
    device: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert gpu_share(device, 3) == 0.0


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("clients", [1, 2, 3, 7, 10, 64])
def test_shares_of_the_clients_fit_whole_gpus_and_leave_one_for_the_server(
    gpus: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    share, each = gpu_share("cuda", clients), math.ceil(clients / gpus)
    assert int(gpus / share) >= clients  # Flower's number of clients at once
    assert each * share < 1.0 < (each + 1) * share  # as many as Ray has room for on one GPU
    assert 1.0 - each * share > 0.8 * share
