"""A deployment on this machine whose plugs can be pulled: SuperLink with a database, SuperNodes, their apps.

Whatever is pulled dies by SIGKILL with all that it has started, as in a power cut.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from app_copy import app_copy
from deployments import environment_of, free_port, listens

from server_app.launch.guard import guarded

PATIENCE_S = 240.0


@dataclass
class Field:
    """A SuperLink and its SuperNodes."""

    folder: Path
    environment: dict[str, str]
    clients: int
    superlink: subprocess.Popen[bytes] | None = None
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    app: Path = field(default_factory=app_copy)
    _port: int = field(default_factory=free_port)

    def start_superlink(self) -> None:
        """Start the SuperLink, on the database that it had."""
        database = str(self.folder / "superlink.db")
        self.superlink = self._start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self._port),
            "--database", database,
        )  # fmt: skip

    def start_node(self, partition: int) -> None:
        """Start a SuperNode; its client's name follows from its partition."""
        config = f"partition-id={partition} num-partitions={self.clients}"
        self.nodes[partition] = self._start(
            f"node-{partition}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self._port}",
            "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def kill_superlink(self) -> None:
        """Pull the plug of the SuperLink's machine, with the ServerApp on it."""
        assert self.superlink is not None
        pull(self.superlink)

    def kill_node(self, partition: int) -> None:
        """Pull the plug of a node's machine, with the ClientApp on it."""
        pull(self.nodes[partition])

    def client_app(self, partition: int) -> psutil.Process | None:
        """Return the process of a node's ClientApp while it works."""
        return _child(self.nodes[partition], "flwr-clientapp")

    def server_app(self) -> psutil.Process | None:
        """Return the process of the ServerApp while it works."""
        return None if self.superlink is None else _child(self.superlink, "flwr-serverapp")

    def run(self, config: str) -> subprocess.Popen[bytes]:
        """Hand a run over to the SuperLink."""
        return self._start("operator", "flwr", "run", str(self.app), "dep", "--run-config", config)

    def submit(self, config: str, patience_s: float = PATIENCE_S) -> None:
        """Hand a run over to the SuperLink, as often as it takes one that has just been started."""
        self.until(lambda: listens(self._port), patience_s)  # `flwr run` does not wait for it
        deadline = time.monotonic() + patience_s
        while self.run(config).wait(patience_s) != 0:
            assert time.monotonic() < deadline, self.said("operator")
            time.sleep(1.0)

    def until(self, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
        """Wait for something that a run does."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, self.said("superlink")[-6000:]
            time.sleep(0.05)

    def said(self, name: str) -> str:
        """What a process and its children said."""
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def last_words(self) -> str:
        """What the ServerApp of the latest run said last: its output goes to the SuperLink's database alone."""
        with contextlib.closing(sqlite3.connect(self.folder / "superlink.db")) as database:
            rows = database.execute("SELECT log FROM task_logs ORDER BY rowid DESC LIMIT 20").fetchall()
        return "".join(row[0] for row in reversed(rows))[-4000:]

    def trainings(self) -> dict[int, int]:
        """Partition -> how often its client began to train."""
        return {n: len(re.findall(r": epoch 1 of", self.said(f"node-{n}"))) for n in range(self.clients)}

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                command, cwd=self.folder / name, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip


@contextlib.contextmanager
def plugged_in(folder: Path, clients: int) -> Iterator[Field]:
    """Lend a deployment with all plugs in, and end it and all that was started with it."""
    folder.mkdir(parents=True, exist_ok=True)
    with guarded() as (home, token):
        environment = environment_of(home, token, folder) | {
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PYTHONUNBUFFERED": "1",
        }
        here = Field(folder, environment, clients)
        address = f"127.0.0.1:{here._port}"
        connection = f'[superlink]\ndefault = "dep"\n[superlink.dep]\naddress = "{address}"\ninsecure = true\n'
        (home / "config.toml").write_text(connection)
        here.start_superlink()
        for partition in range(clients):
            here.start_node(partition)
        yield here


def pull(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started by SIGKILL, and see it gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        for child in children:
            kill(child)
    process.wait(20.0)


def kill(process: psutil.Process | None) -> bool:
    """End one process by SIGKILL; tell whether it was there."""
    try:
        if process is not None:
            process.kill()
        return process is not None
    except psutil.NoSuchProcess:
        return False


def uploads_in(run_dir: Path) -> dict[str, str]:
    """Client -> sha256 of the accepted uploads of a run; a line that is being written does not count yet."""
    index = run_dir / "uploads.jsonl"
    lines = index.read_text().split("\n")[:-1] if index.exists() else []
    rows = [json.loads(line) for line in lines]
    assert len({row["client"] for row in rows}) == len(rows), f"two uploads of one client: {lines}"
    return {row["client"]: row["sha256"] for row in rows}


def result_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the result of a run, or None if it has none."""
    path = run_dir / "result.json"
    result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return result


def _child(parent: subprocess.Popen[bytes], name: str) -> psutil.Process | None:
    try:
        for child in psutil.Process(parent.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE and any(name in part for part in child.cmdline()[:3]):
                    return child
    except psutil.NoSuchProcess:
        pass
    return None
