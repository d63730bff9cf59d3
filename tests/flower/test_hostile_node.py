"""A node with a valid key whose answer cannot be inflated: the run ends with the honest uploads, and names the node."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import hostile
import pytest
from deployments import ROOT, Federation, federation
from test_deploy_tls import facts_of

pytestmark = pytest.mark.slow

HOSPITALS = ["hospital-a", "hospital-b"]
SETTINGS = "method='fedavg' client.epochs=1 data.image-size=8 data.limit=300 threads=1 min-uploads=2 deadline-s=300"


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """The configs of two honest nodes and a third."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    for partition, name in enumerate([*HOSPITALS, "mallory"]):
        facts = {"client": name, "architecture": "lenet5", "partition-id": partition, "num-partitions": 3}
        (folder / f"{name}.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items()))
    return folder


def test_an_array_that_names_an_absent_chunk_costs_its_node_alone(tmp_path: Path, nodes: Path) -> None:
    with federation(tmp_path, nodes) as here:
        mallory = here.machines["mallory"]
        mallory.environment["PYTHONPATH"] = hostile.place(mallory.folder / "hostile")
        (mallory.folder / "hostile" / "attack").write_text("an absent chunk")
        here.superlink()
        join(here, *HOSPITALS)
        alone = run(here, "alone")
        join(here, "mallory")
        beside = run(here, "beside")
        said = logged(here)

    ((client, reason),) = beside.pop("refusals")
    assert (client, reason.split(": ")[:2]) == ("mallory", ["its answer cannot be read", "IndexError"])
    assert f"refused mallory: {reason}" in said
    assert alone.pop("refusals") == []
    assert [row["client"] for row in beside["uploads"]] == HOSPITALS
    assert beside == alone


def join(here: Federation, *names: str) -> None:
    """Start nodes and wait until the SuperLink has taken them in."""
    for name in names:
        here.register(name)
        here.node(name)
    here.until(lambda: all("SuperNode ID" in here.machines[name].log.read_text() for name in names))


def run(here: Federation, name: str) -> dict[str, Any]:
    """Run to the end and return the facts that must not depend on the hostile node."""
    folder = here.home / "server" / "runs" / name
    here.server.call("flwr", "run", str(ROOT), "hospitals", "--run-config", f"{SETTINGS} run-dir='{folder}'")
    here.until((folder / "result.json").exists)
    return facts_of(folder)


def logged(here: Federation) -> str:
    """Return the log of all runs, which the SuperLink keeps."""
    with contextlib.closing(sqlite3.connect(here.server.folder / "superlink.db")) as database:
        return "".join(text for (text,) in database.execute("SELECT log FROM task_logs ORDER BY rowid"))
