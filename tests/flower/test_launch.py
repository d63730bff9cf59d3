"""Whole runs of a small app: how they end, how fast a killed one is noticed, and that nothing is left of any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from app_copy import pyproject
from deployments import LOOPBACK, listening

from server_app.launch import guard
from server_app.launch.superlink import Scalar, launch
from strategies.core.processor import all_cores

pytestmark = pytest.mark.slow

CONFIG = """
mode = "ask"
nodes = 2
facts = ""
text = ""
lr.start = 0.1
flag = false
"""
APP = """
import json, os, subprocess, sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@client.query()
def answer(message, context):
    child = "import importlib.util as found; print(found.find_spec('probe_app').origin)"
    module = subprocess.run([sys.executable, "-P", "-c", child], capture_output=True, text=True).stdout
    facts = ConfigRecord({"pid": os.getpid(), "cwd": os.getcwd(), "module": module})
    return Message(RecordDict({"facts": facts}), reply_to=message)

@server.main()
def main(grid, context):
    settings = dict(context.run_config)
    if settings["mode"] == "raise":
        raise ValueError("the server does not like it")
    while len(list(grid.get_node_ids())) < settings["nodes"]:  # the simulation registers them beside this thread
        time.sleep(0.1)
    requests = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(requests))
    print(f"got {len(replies)} replies", flush=True)
    facts = {"settings": settings, "pid": os.getpid(), "clients": [dict(r.content["facts"]) for r in replies],
             "folder": os.environ["FLWR_HOME"], "token": os.environ["ONESHOT_GUARD"]}
    Path(settings["facts"] + ".part").write_text(json.dumps(facts))
    os.replace(settings["facts"] + ".part", settings["facts"])
    while settings["mode"] == "wait":
        time.sleep(0.1)
"""
LAUNCHER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from server_app.launch.superlink import launch
    try:
        settings = {"mode": "wait", "facts": sys.argv[2]}
        print(launch(Path(sys.argv[1]), settings=settings, num_supernodes=2, echo=print, at_once=1))
    except KeyboardInterrupt:
        sys.exit(130)
    """
)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(pyproject("probe_app:server", "probe_app:client", CONFIG))
    (folder / "probe_app.py").write_text(APP)
    return folder


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[Path]:
    """Where the ServerApp writes what it saw; afterwards nothing of its run may be left."""
    path = tmp_path / "facts.json"
    yield path
    if path.exists():
        seen = json.loads(path.read_text())
        assert within(15, lambda: is_gone(seen))


def is_gone(seen: dict[str, Any]) -> bool:
    folder = Path(seen["folder"])
    return not folder.exists() and not guard.members(seen["token"], folder)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def wait_for(facts: Path, gave_up: Callable[[], bool]) -> dict[str, Any]:
    within(90, lambda: facts.exists() or gave_up())
    seen: dict[str, Any] = json.loads(facts.read_text())
    return seen


@pytest.mark.parametrize("ends", [False, True])
def test_launch_passes_settings_and_returns_zero_when_the_run_completes_or_its_result_is_there(
    app: Path, facts: Path, ends: bool
) -> None:
    """One run completes, with one process of clients; the other would go on for ever, so Flower is not waited for."""
    environment = app / "python"  # any folder with this file is a virtual environment, and is not shipped
    environment.mkdir()
    (environment / "pyvenv.cfg").write_text("")
    (environment / "broken.toml").write_bytes(b"\xff" * 11_000_000)  # more than Flower accepts
    settings: dict[str, Scalar] = {
        "facts": str(facts),
        "nodes": 3,
        "text": "a \"b\" 'c' \\ ä\n=",
        "lr.start": 1e-5,
        "flag": True,
        "mode": "ask" if ends else "wait",
    }
    lines: list[str] = []
    there = (lambda: False) if ends else facts.exists
    at_once = 1 if ends else None
    launched = launch(app, settings=settings, num_supernodes=3, echo=lines.append, is_finished=there, at_once=at_once)
    assert (launched.exit_code, launched.run_status, launched.reason) == (0, "finished:completed", ""), lines
    seen = json.loads(facts.read_text())
    assert seen["settings"] == settings
    assert len(seen["clients"]) == 3
    assert len({client["pid"] for client in seen["clients"]}) == 1 or not ends
    assert any(line.startswith("one process trains the clients") for line in lines) == (ends and all_cores() > 1)
    assert {client["cwd"] for client in seen["clients"]} == {str(Path(seen["folder"]) / "cwd")}
    assert all(client["module"].startswith(seen["folder"]) for client in seen["clients"])  # a child finds the app
    if ends:
        assert is_gone(seen)
        assert any("got 3 replies" in line for line in lines)
    assert not any(line.endswith("\n") for line in lines)


def test_launch_when_the_server_app_raises_returns_its_error_in_one_line(app: Path) -> None:
    launched = launch(app, settings={"mode": "raise"}, num_supernodes=1, echo=print)
    assert (launched.exit_code, launched.run_status) == (1, "finished:failed")
    assert "the server does not like it" in launched.reason
    assert "\n" not in launched.reason


def test_launch_when_no_client_can_start_returns_the_reason(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 0}')
    began = time.monotonic()
    launched = launch(app, settings={}, num_supernodes=2, echo=print)
    assert launched.exit_code == 1
    assert "ActorPool is empty" in launched.reason
    assert time.monotonic() - began < 60


def test_launch_with_a_setting_that_the_app_lacks_is_refused(app: Path) -> None:
    launched = launch(app, settings={"colour": "red"}, num_supernodes=2, echo=print)
    assert (launched.exit_code, launched.run_status) == (1, "not started")
    assert "configuration" in launched.reason


def test_launch_when_folder_is_no_app_says_so(tmp_path: Path) -> None:
    launched = launch(tmp_path, settings={}, num_supernodes=2, echo=print)
    assert (launched.exit_code, launched.run_status) == (1, "not started")
    assert str(tmp_path) in launched.reason
    assert "pyproject.toml" in launched.reason


@pytest.fixture
def launcher(app: Path, facts: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that launches a run without end, as the leader of its own group."""
    command = [sys.executable, "-c", LAUNCHER, str(app), str(facts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process
        process.kill()


def test_launch_when_its_process_group_is_killed_leaves_nothing(facts: Path, launcher: subprocess.Popen[str]) -> None:
    seen = wait_for(facts, lambda: launcher.poll() is not None)
    folder = Path(seen["folder"])
    family = guard.members(seen["token"], folder)
    names = " ".join(" ".join(process.cmdline()) for process in family)
    for name in ("flower-superlink", "launch/simulation.py", "gcs_server", "raylet"):
        assert name in names
    assert {client["pid"] for client in seen["clients"]} <= {process.pid for process in family}
    assert psutil.Process(seen["pid"]) in family
    heard = set().union(*(listening(process) for process in family))
    assert {"raylet", "gcs_server"} <= {name for name, _ in heard}
    assert {address for _, address in heard} <= LOOPBACK, heard  # which no other machine reaches
    os.killpg(launcher.pid, signal.SIGKILL)
    assert within(15, lambda: is_gone(seen))
