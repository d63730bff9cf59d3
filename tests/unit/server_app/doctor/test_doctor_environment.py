from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from server_app.doctor import environment
from server_app.doctor import environment as room
from server_app.doctor.environment import INSTALLATION
from strategies.uploads.checks import MIB

GOOD = {
    INSTALLATION: "1",
    "MALLOC_ARENA_MAX": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}


def test_variables_when_all_are_set_are_ok() -> None:
    assert {finding.level for finding in environment.variables("server", GOOD)} == {"ok"}
    assert len(list(environment.variables("server", GOOD))) == 5


@pytest.mark.parametrize(("value", "level"), [("true", "error"), ("0", "error"), (None, "error"), ("1", "ok")])
def test_runtime_installation_has_to_be_off_on_a_server(value: str | None, level: str) -> None:
    given = {**GOOD, INSTALLATION: value} if value is not None else {k: v for k, v in GOOD.items() if k != INSTALLATION}

    found = {finding.check: finding for finding in environment.variables("server", given)}  # type: ignore[arg-type]

    assert found["runtime installation"].level == level
    assert level == "ok" or f"export {INSTALLATION}=1" in found["runtime installation"].fix


def test_a_node_needs_fewer_variables_and_none_of_them_is_an_error() -> None:
    assert [finding.level for finding in environment.variables("node", {})] == ["warning", "warning"]


def test_a_proxy_on_the_way_to_the_superlink_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "safe.example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    using = {"https": "http://me:secret@proxy:3128", "no": "x"}

    (caught,) = environment.proxies("server.example.org", using)
    (bypassed,) = environment.proxies("safe.example.org", using)
    (none,) = environment.proxies("server.example.org", {})

    assert (caught.level, bypassed.level, none.level) == ("warning", "ok", "ok")
    assert "NO_PROXY=server.example.org" in caught.fix
    assert "http://proxy:3128" in caught.found
    assert "secret" not in caught.found


@pytest.mark.parametrize(("limit", "level"), [(256, "warning"), (1055, "warning"), (1056, "ok")])
def test_open_files_have_to_suffice_for_all_clients(limit: int, level: str) -> None:
    (found,) = environment.open_files(100, limit)

    assert found.level == level
    assert level == "ok" or "ulimit -n 1056" in found.fix


def test_a_folder_is_written_to_where_it_will_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    (good,) = environment.writable(tmp_path / "a" / "b", "run folder", "make it")
    (bad,) = environment.writable(tmp_path / "file" / "b", "run folder", "make it")

    assert (good.level, bad.level, bad.fix) == ("ok", "error", "make it")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


class Process:
    def __init__(self, pid: int, *words: str) -> None:
        self.pid, self._words = pid, list(words)

    def name(self) -> str:
        if not self._words:
            raise psutil.NoSuchProcess(self.pid)
        return Path(self._words[0]).name

    def cmdline(self) -> list[str]:
        return self._words


def test_processes_of_flower_and_ray_are_named_and_left_alone() -> None:
    running: Any = [
        Process(1, "/bin/python3", "/venv/bin/flower-superlink", "--insecure"),
        Process(2, "/ray/raylet", "--x"),
        Process(3, "/bin/grep", "x", "flower-supernode"),
        Process(4),
    ]

    (found,) = environment.left_overs(running)
    (none,) = environment.left_overs(running[2:])

    assert (found.level, none.level) == ("warning", "ok")
    assert found.found == "running here: flower-superlink (process 1); raylet (process 2)"


@pytest.mark.parametrize(("free", "level"), [(10 * MIB, "error"), (1000 * MIB, "warning"), (5000 * MIB, "ok")])
def test_the_disk_of_the_run_folder_has_to_hold_the_uploads(tmp_path: Path, free: int, level: str) -> None:
    *_, disk = room.run_folder(str(tmp_path), 500 * MIB, 50 * MIB, free)

    assert disk.level == level
    assert level == "ok" or disk.fix


def test_the_run_folder_should_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    unnamed = {finding.check: finding.level for finding in room.run_folder("", MIB, MIB)}
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))

    assert unnamed["run folder's place"] == "warning"
    assert [finding.check for finding in room.run_folder("", MIB, MIB)] == ["run folder", "disk of the run folder"]


def test_the_state_folder_and_the_memory_of_a_node_have_to_suffice(tmp_path: Path) -> None:
    assert [finding.level for finding in room.client_state(str(tmp_path), 40 * MIB, 9000 * MIB)] == ["ok", "ok"]
    assert [finding.level for finding in room.client_state(str(tmp_path), 40 * MIB, 70 * MIB)] == ["ok", "error"]
    assert [finding.level for finding in room.node_memory(40 * MIB, 9000 * MIB)] == ["ok"]
    assert [finding.level for finding in room.node_memory(40 * MIB, 900 * MIB)] == ["warning"]


@pytest.mark.parametrize(("available", "level"), [(3 * 1024 * MIB, "warning"), (9 * 1024 * MIB, "ok")])
def test_the_memory_of_a_server_has_to_hold_the_ensemble(available: int, level: str) -> None:
    (found,) = room.server_memory(2000 * MIB, 40 * MIB, available)

    assert found.level == level
    assert "2.0 GiB of models" in found.needed


def test_a_model_above_the_largest_upload_is_an_error() -> None:
    sizes = {"small": MIB, "large": 3 * MIB + 1}

    assert [finding.level for finding in room.upload_limit(sizes, 4.0)] == ["ok"]
    (found,) = room.upload_limit(sizes, 3.0)
    assert (found.level, "max-upload-mib=4" in found.fix) == ("error", True)
