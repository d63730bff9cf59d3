"""A whole run in a network of nothing but itself, what it listens on meanwhile, and one that wants out."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from server_app.launch.superlink import launch
from strategies.core import offline

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "method=dense client.epochs=1 data.image-size=8 data.limit=200 threads=1 dense.epochs=2 dense.generator-steps=2"
    " dense.synthesis-batch-size=16 dense.latent=16"
)
PYPROJECT = """
[project]
name = "curious-app"
version = "1.0.0"
description = "Wants out."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "probe"
[tool.flwr.app.components]
serverapp = "curious_app:server"
clientapp = "curious_app:client"
[tool.flwr.app.config]
"""
# A client that keeps quiet about it, and a server that does not.
APP = """
import time, urllib.error, urllib.request
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@client.query()
def answer(message, context):
    try:
        urllib.request.urlopen("http://192.0.2.7:8088/", timeout=2)
    except urllib.error.URLError:
        pass
    return Message(RecordDict({"facts": ConfigRecord({"said": "nothing"})}), reply_to=message)

@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    nodes = list(grid.get_node_ids())
    replies = list(grid.send_and_receive([Message(RecordDict(), dst_node_id=n, message_type="query") for n in nodes]))
    assert not any(reply.has_error() for reply in replies)
    urllib.request.urlopen("http://elsewhere.example/", timeout=2)
"""


# Networks: of this machine alone, and one with an address that others would reach. Neither has another machine.
ALONE = "ip link set lo up"
OUTSIDE = f"{ALONE} && ip link add out type veth peer name in && ip addr add 198.51.100.9/24 dev out"
OUTSIDE += " && ip link set out up && ip link set in up && ip route add default via 198.51.100.1"
IN_A_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
LISTEN = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # states in /proc/net


def refused_networks() -> str:
    """Say why this machine does not lend us networks of our own; nothing if it does."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return "unshare and ip are needed"
    tried = subprocess.run([*IN_A_NETWORK, OUTSIDE], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


def oneshot_run(folder: Path, network: str, *more: str) -> tuple[dict[str, Any], str, set[str]]:
    """Run the app in a network of its own; return its result, its log, and the addresses on which anybody listened."""
    folder.mkdir()
    command = [str(Path(sys.executable).with_name("oneshot")), "run", str(ROOT), "--num-supernodes", "2", *more]
    command += ["--format", "json", "--run-config", f"{SETTINGS} run-dir={folder / 'run'}"]
    environ = {key: value for key, value in os.environ.items() if key not in (offline.VARIABLE, "RAY_ADDRESS")}
    environ |= {"ONESHOT_CLIENT_STATE": str(folder / "clients")}
    with (folder / "log").open("w") as log, (folder / "result").open("w") as output:
        wrapped = [*IN_A_NETWORK, f'{network} && exec "$@"', "sh", *command]
        process = subprocess.Popen(wrapped, env=environ, stdout=output, stderr=log)
        heard: set[str] = set()
        try:
            while process.poll() is None:
                heard |= listening(process.pid)
                time.sleep(0.3)
        finally:
            process.terminate()
            process.wait()
    said = (folder / "log").read_text()
    assert process.returncode == 0, said
    return json.loads((folder / "result").read_text().splitlines()[-1]), said, heard


def listening(pid: int) -> set[str]:
    """Return the addresses on which the processes in a process's network listen; none before it has its own."""
    found: set[str] = set()
    try:
        if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            return found
    except OSError:
        return found
    for kind, state in LISTEN.items():
        try:
            lines = Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
        except OSError:  # it has just ended
            continue
        found |= {address(line.split()[1].partition(":")[0]) for line in lines if line.split()[3] == state}
    return found


def address(written: str) -> str:
    """Return an address from how /proc writes it: words of four bytes, each backwards."""
    raw = b"".join(bytes.fromhex(written[at : at + 8])[::-1] for at in range(0, len(written), 8))
    ip = ipaddress.ip_address(raw)
    return str(getattr(ip, "ipv4_mapped", None) or ip)


@pytest.mark.ray
def test_run_without_a_network_ends_with_the_same_bits_and_nothing_ever_listens_outside(tmp_path: Path) -> None:
    if reason := refused_networks():
        pytest.skip(f"this machine lends no network of our own: {reason}")
    usual, _, heard = oneshot_run(tmp_path / "usual", OUTSIDE)
    alone, said, heard_alone = oneshot_run(tmp_path / "alone", ALONE, "--offline")
    assert alone["weights_sha256"] == usual["weights_sha256"]
    assert "127.0.0.1" in heard & heard_alone
    assert {each for each in heard | heard_alone if not ipaddress.ip_address(each).is_loopback} == set()
    assert "offline:" not in said  # nothing was refused, for nothing was tried
    assert (tmp_path / "alone" / "run").stat().st_mode & 0o077 == 0


@pytest.mark.ray
def test_run_off_the_network_fails_and_names_the_program_and_the_address_of_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "curious_app.py").write_text(APP)
    monkeypatch.setenv(offline.VARIABLE, "1")
    lines: list[str] = []
    launched = launch(tmp_path, settings={}, num_supernodes=2, echo=lines.append)
    assert launched.run_status == "finished:failed", lines
    assert "offline: looking up elsewhere.example is refused in flwr-simulation" in launched.reason
    told = [line for line in lines if line.startswith("offline: ")]
    assert any(line.startswith("offline: a connection to 192.0.2.7:8088 is refused in") for line in told), lines
