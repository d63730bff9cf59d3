"""A SuperLink with SuperNodes on this machine; whatever a test starts ends with it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from server_app.guard import TOKEN_KEY, guarded

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATIENCE_S = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Deployment:
    """A SuperLink that runs.

    Attributes:
        folder: Where every process has a folder of its own, and its output.
        environment: Of every process.
        address: The SuperLink's.
    """

    folder: Path
    environment: dict[str, str]
    address: str

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own."""
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder / name,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def node(self, name: str, config: str) -> subprocess.Popen[bytes]:
        """Start a SuperNode."""
        return self.start(
            name, "flower-supernode", "--insecure", "--superlink", self.address,
            "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def run(self, config: str) -> subprocess.Popen[bytes]:
        """Start the app."""
        return self.start("operator", "flwr", "run", str(ROOT), "dep", "--stream", "-c", config)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a run does."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        """What all processes said."""
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """Lend a SuperLink, and end it and all that was started with it."""
    port = free_port()
    with guarded() as (home, token):
        environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(home),
            "ONESHOT_CLIENT_STATE": str(folder / "clients"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            TOKEN_KEY: token,
        }
        connection = f'[superlink]\ndefault = "dep"\n[superlink.dep]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (home / "config.toml").write_text(connection)
        here = Deployment(folder, environment, f"127.0.0.1:{port}")
        here.start("server", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        yield here
