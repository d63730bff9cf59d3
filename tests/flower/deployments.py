"""A SuperLink with SuperNodes on this machine; whatever a test starts ends with it."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from server_app.launch.guard import TOKEN_KEY, guarded, members

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATIENCE_S = 480.0
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


_GIVEN_PORTS: set[int] = set()
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def free_port() -> int:
    """Return a port that nothing here listens at, and that no earlier call returned.

    A node that ended leaves processes which ask at its port for a while. They would work for the next node there.
    """
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        if port not in _GIVEN_PORTS:
            _GIVEN_PORTS.add(port)
            return port


def environment_of(home: Path, token: str, folder: Path) -> dict[str, str]:
    """Return the environment of a deployment's processes, which end with ``guarded``."""
    return os.environ | QUIET | {
        "FLWR_HOME": str(home),
        "RAY_TMPDIR": str(home),
        "ONESHOT_CLIENT_STATE": str(folder / "clients"),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        TOKEN_KEY: token,
    }  # fmt: skip


def listens(port: int) -> bool:
    """Return whether a server of this machine takes connections at the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class Machine:
    """A folder that stands for a machine: its processes see its files, its own environment, and nothing of others."""

    name: str
    folder: Path
    environment: dict[str, str]
    log: Path

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command of the deployment page."""
        with self.log.open("a") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def call(self, *command: str) -> str:
        """Run a command to its end and return what it prints."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        with self.log.open("a") as log:
            log.write(done.stdout + done.stderr)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


@dataclass(frozen=True)
class Federation:
    """A SuperLink with TLS and node authentication, and machines for its nodes."""

    keys: Path
    machines: Mapping[str, Machine]
    address: str
    home: Path
    token: str

    @property
    def server(self) -> Machine:
        """The machine of the SuperLink, where runs are started."""
        return self.machines["server"]

    def superlink(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start the SuperLink and wait until it answers."""
        host, port = self.address.split(":")
        process = self.server.start(
            "python", str(ROOT / "deploy" / "superlink.py"), "--host", host, "--port", port, "--enable-supernode-auth",
            "--database", "superlink.db", "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem",
            "--ssl-keyfile", "server.key", *flags,
        )  # fmt: skip
        self.until(lambda: self.status("GET", "/health") == http.client.OK)
        return process

    def register(self, name: str) -> None:
        """Let a node in."""
        self.server.call("flwr", "supernode", "register", str(self.keys / "public" / f"{name}.pub"), "hospitals")

    def node(self, name: str) -> subprocess.Popen[bytes]:
        """Start a node's SuperNode."""
        return self.machines[name].start(
            "flower-supernode", "--superlink", self.address, "--root-certificates", "ca.crt",
            "--auth-supernode-private-key", "node.key", "--node-config", "node.toml", "--port", str(free_port()),
        )  # fmt: skip

    def status(self, method: str, path: str, *, source: str = "127.0.0.1") -> int | None:
        """Return how the SuperLink answers a request from an address of this machine; None if it does not."""
        host, port = self.address.split(":")
        trusted = ssl.create_default_context(cafile=self.keys / "ca.crt")
        connection = http.client.HTTPSConnection(
            host, int(port), timeout=10, context=trusted, source_address=(source, 0)
        )
        try:
            connection.request(method, path, body=b"")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def listening(self) -> set[tuple[str, str]]:
        """Return who of the federation's processes waits for connections, and on which address."""
        return set().union(*(listening(process) for process in members(self.token, self.home)))

    def until(self, condition: Callable[[], bool], *, pause_s: float = 0.2) -> None:
        """Wait for something that happens on some machine."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(pause_s)

    def logs(self) -> str:
        """The end of what every machine said."""
        lines = {
            name: machine.log.read_text()[-4000:] for name, machine in self.machines.items() if machine.log.exists()
        }
        return "\n".join(f"== {name}\n{text}" for name, text in lines.items())


@contextlib.contextmanager
def federation(folder: Path, nodes: Path, strangers: tuple[str, ...] = ()) -> Iterator[Federation]:
    """Lend the machines of a deployment with their keys and configs, and end all that is started on them.

    A folder among the nodes' configs is copied to every machine; a stranger has the first node's config.
    """
    files = {file.stem: file for file in sorted(nodes.glob("*.toml"))}
    files |= dict.fromkeys(strangers, next(iter(files.values())))
    keys = folder / "keys"
    named = [word for name in files for word in ("--node", name)]
    subprocess.run([sys.executable, str(ROOT / "deploy" / "make_keys.py"), str(keys), "--server", "127.0.0.1", *named],
                   check=True, capture_output=True)  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    with guarded() as (home, token):
        machines = {name: _machine(home / name, folder / f"{name}.log", token) for name in ("server", *files)}
        server = machines["server"]
        server.environment["ONESHOT_NODE_KEYS"] = str(keys / "public" / "node_keys")
        server.environment["RAY_TMPDIR"] = str(home)  # short, for the sockets in it
        shutil.copytree(keys / "server", server.folder, dirs_exist_ok=True)
        (server.folder / ".flwr").mkdir()
        (server.folder / ".flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "hospitals"\n[superlink.hospitals]\naddress = "{address}"\n'
            f'root-certificates = "{server.folder / "ca.crt"}"\n'
        )
        for name, file in files.items():
            shutil.copytree(keys / name, machines[name].folder, dirs_exist_ok=True)
            shutil.copy(file, machines[name].folder / "node.toml")
            for extra in (path for path in nodes.iterdir() if path.is_dir()):
                shutil.copytree(extra, machines[name].folder / extra.name)
        yield Federation(keys, machines, address, home, token)


def listening(process: psutil.Process) -> set[tuple[str, str]]:
    """Return a process's name with each address on which it waits for connections."""
    try:
        name, sockets = process.name(), process.net_connections(kind="inet")
    except psutil.Error:
        return set()
    return {(name, entry.laddr.ip) for entry in sockets if entry.status == psutil.CONN_LISTEN}


def _machine(folder: Path, log: Path, token: str) -> Machine:
    (folder / "tmp").mkdir(parents=True)
    environment = QUIET | {
        "PATH": f"{BIN}{os.pathsep}{os.defpath}",
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "FLWR_HOME": str(folder / ".flwr"),
        "ONESHOT_CLIENT_STATE": str(folder / "state"),
        TOKEN_KEY: token,
    }
    return Machine(folder.name, folder, environment, log)
