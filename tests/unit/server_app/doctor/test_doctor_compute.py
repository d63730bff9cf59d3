from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from server_app.doctor import compute
from server_app.doctor.compute import Torch


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (Torch("2.13.0+cu130", "13.0", 2, True, None), "ok", "2; torch"),
        (Torch("2.13.0+cpu", "", 0, False, None), "ok", "the CPU does the work"),
        (Torch("2.13.0+cpu", "", 0, True, None), "warning", "though the machine has NVIDIA's driver"),
        (Torch("2.13.0+cu130", "13.0", 0, False, None), "warning", "driver is missing"),
        (Torch("2.13.0+cu130", "13.0", 0, True, None), "warning", "though the driver is installed"),
        (Torch("2.13.0+cu130", "13.0", 0, True, ""), "warning", "CUDA_VISIBLE_DEVICES is ''"),
    ],
)
def test_gpus_that_torch_does_not_see_are_explained(found: Torch, level: str, said: str) -> None:
    (finding,) = compute.torch_gpus(found)

    assert finding.level == level
    assert said in finding.found
    assert bool(finding.fix) == (level != "ok")


def test_a_device_that_is_not_here_is_an_error() -> None:
    levels = [finding.level for name in ("auto", "cpu", "cuda:99", "abacus") for finding in compute.device(name)]

    assert levels == ["ok", "ok", "error", "error"]
    (finding,) = compute.device("cuda:99", "client.device")
    assert "set 'client.device' to" in finding.found
    assert finding.fix.startswith("set client.device=auto")


def asked(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | str, gpus: int, cluster: str = "") -> list[Any]:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setattr(compute, "_asked", lambda _: answer)
    monkeypatch.setattr(Torch, "here", classmethod(lambda cls: cls("2.13.0", "13.0", gpus, True, None)))
    return list(compute.ray())


@pytest.mark.parametrize(
    ("by_ray", "by_torch", "cluster", "levels"),
    [
        (0, 0, "", ["ok", "ok"]),
        (2, 2, "", ["ok", "ok"]),
        (0, 1, "", ["ok", "warning"]),
        (1, 0, "", ["ok", "warning"]),
        (8, 0, "head:6379", ["ok", "ok"]),
    ],
)
def test_gpus_of_ray_and_of_torch_have_to_agree_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, by_ray: int, by_torch: int, cluster: str, levels: list[str]
) -> None:
    answer = {"version": "2.55.1", "nodes": 2, "resources": {"GPU": float(by_ray), "CPU": 1.0}}

    assert [finding.level for finding in asked(monkeypatch, answer, by_torch, cluster)] == levels


@pytest.mark.parametrize(("cluster", "level"), [("", "warning"), ("head:6379", "error")])
def test_a_ray_that_fails_is_an_error_only_where_a_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch, cluster: str, level: str
) -> None:
    (found,) = asked(monkeypatch, "no answer within 3 s", 0, cluster)

    assert (found.level, found.found, found.fix != "") == (level, "no answer within 3 s", True)


@pytest.mark.slow
def test_asking_ray_ends_in_time_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        started.append(options["env"]["ONESHOT_GUARD"])
        sleeper = (
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        )
        return real([sys.executable, "-c", f"{sleeper}; time.sleep(60)"], **options)

    monkeypatch.setattr(subprocess, "run", run)

    said = compute._asked(1.5)

    assert said == "no answer within 1.5 s"
    assert not [p.pid for p in psutil.process_iter() if _carries(p, started[0])]


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")

    (found,) = compute.ray(60.0)

    assert found.level == "error"
    assert "127.0.0.1:9" in found.found
    assert "unset RAY_ADDRESS" in found.fix


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_of_its_own_starts_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    found = list(compute.ray())

    assert [finding.level for finding in found] == ["ok", "ok"], found


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get("ONESHOT_GUARD") == token
    except psutil.Error:
        return False
