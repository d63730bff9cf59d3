"""Two honest nodes and a hostile one in a deployment with keys, and runs without and beside the hostile one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import psutil
from app_copy import app_copy
from deployments import Federation, federation
from test_deploy_tls import facts_of

from server_app.launch.guard import members

HOSPITALS = ["hospital-a", "hospital-b"]
HOSTILE = "mallory"
COMMON = "client.epochs=1 data.image-size=8 data.limit=300 threads=1 min-uploads=2 deadline-s=300 max-upload-mib=16.0"
SETTINGS = f"method='fedavg' {COMMON}"
IN_ROUNDS = f"method='fens' fens.aggregator='per-class' fens.rounds=2 fens.local-steps=5 fens.server-lr=0.1 {COMMON}"


@contextlib.contextmanager
def intruded(folder: Path) -> Iterator[Federation]:
    """Lend a deployment whose honest nodes are connected; the hostile one waits for :func:`join`."""
    nodes = folder / "nodes"
    nodes.mkdir()
    for partition, name in enumerate([*HOSPITALS, HOSTILE]):
        facts = {"client": name, "architecture": "lenet5", "partition-id": partition, "num-partitions": 3}
        (nodes / f"{name}.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items()))
    with federation(folder, nodes) as here:
        machine = here.machines[HOSTILE]
        machine.environment["PYTHONPATH"] = hostile.place(machine.folder / "hostile")
        here.superlink()
        join(here, *HOSPITALS)
        yield here


def join(here: Federation, *names: str) -> None:
    """Start nodes and wait until the SuperLink has taken them in."""
    for name in names:
        here.register(name)
        here.node(name)
    here.until(lambda: all("SuperNode ID" in here.machines[name].log.read_text() for name in names))


def attack_by(here: Federation, kind: str) -> None:
    """Choose the attack of the hostile node's next answers."""
    (here.machines[HOSTILE].folder / "hostile" / "attack").write_text(kind)


def run(here: Federation, name: str, settings: str = SETTINGS) -> tuple[dict[str, Any], int]:
    """Run to the end; return the facts that no hostile node may change, and the ServerApp's peak memory in bytes."""
    folder, peak = here.home / "server" / "runs" / name, [0]
    here.server.call("flwr", "run", str(app_copy()), "hospitals", "--run-config", f"{settings} run-dir='{folder}'")

    def over() -> bool:
        peak.append(memory_of(here))
        return (folder / "result.json").exists()

    here.until(over)
    return facts_of(folder), max(peak)


def memory_of(here: Federation) -> int:
    """Return the memory of the ServerApp, 0 where none runs."""
    found = [0]
    for process in members(here.token, here.home):
        with contextlib.suppress(psutil.Error):
            if any("flwr-serverapp" in word for word in process.cmdline()[:3]):
                found.append(int(process.memory_info().rss))
    return max(found)
