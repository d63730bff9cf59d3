"""What deploy/ tells an operator to do, done: TLS, node keys, machines of their own, and a hostile node among them.

It ends as the rehearsal of the honest nodes does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from app_copy import app_copy
from deployments import LOOPBACK, ROOT, Federation, federation
from safetensors.torch import save_file
from typer.testing import CliRunner

from fl_app.models import build
from server_app import cli as command_line

pytestmark = pytest.mark.slow

CLIENTS = ["hospital-a", "hospital-b", "hospital-c"]
TOO_FEW = "the client's test examples are too few: must be at least 1 ('min-test-examples')"
HOSTILE = "mallory"  # its answer cannot be inflated
# Rounds are left to `make soak`: each takes ten seconds here.
SETTINGS = (
    "method='fedens' client.epochs=2 data.image-size=8 data.limit=300 threads=1 min-uploads=3 deadline-s=400 "
    "evaluate.on='clients' client.test-share=0.2"  # so the server opens no examples
)


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """The node configs of deploy/nodes, and the model that the third of them names."""
    folder = tmp_path / "nodes"
    shutil.copytree(ROOT / "deploy" / "nodes", folder)
    torch.manual_seed(0)
    (folder / "models").mkdir(exist_ok=True)
    model = build("resnet8-ds", num_classes=10, input_shape=(1, 8, 8))
    save_file(model.state_dict(), folder / "models" / "hospital-c.safetensors")
    return folder


@pytest.fixture
def intruded(nodes: Path, tmp_path: Path) -> Path:
    """The same nodes and a hostile one."""
    folder = Path(shutil.copytree(nodes, tmp_path / "intruded"))
    (folder / f"{HOSTILE}.toml").write_text(
        f'client = "{HOSTILE}"\narchitecture = "lenet5"\npartition-id = 0\nnum-partitions = 2\n'
    )
    return folder


def test_a_deployment_with_tls_and_node_keys_ends_as_the_rehearsal_of_its_honest_nodes(
    tmp_path: Path, nodes: Path, intruded: Path, plotless: str, without_plots: None
) -> None:
    heard: set[tuple[str, str]] = set()
    with federation(tmp_path, intruded, strangers=("stranger",)) as here:
        # Other code installed on a node: what the run brings goes before it.
        decoy = here.home / "hospital-b" / "installed" / "client_app"
        decoy.mkdir(parents=True)
        (decoy / "__init__.py").write_text("raise RuntimeError('the code installed on the node ran')")
        here.machines["hospital-b"].environment["PYTHONPATH"] = str(decoy.parent)
        machine = here.machines[HOSTILE]
        machine.environment["PYTHONPATH"] = hostile.place(machine.folder / "hostile", "an absent chunk")
        here.server.environment["PYTHONPATH"] = plotless.partition(os.pathsep)[0]
        here.server.environment["RAY_ADDRESS"] = "127.0.0.1:1"  # a cluster that is gone
        here.superlink()
        assert_control_commands_are_local(here)
        stranger = here.node("stranger")
        here.until(lambda: stranger.poll() is not None)
        for name in (*CLIENTS, HOSTILE):
            here.register(name)
            here.node(name)
        here.until(lambda: all(active(here, name) for name in (*CLIENTS, HOSTILE)))
        deployed = deploy(here, heard)
        page = (here.home / "server" / "runs" / "fedens" / "report.html").read_text()
        assert_is_kept_out(here, stranger)
        said = logged(here)
    assert_hears_nobody_else(heard)
    refused = [reason for client, reason in deployed["refusals"] if client == HOSTILE]
    unread = [reason for reason in refused if reason.startswith("its answer cannot be read: IndexError: ")]
    assert len(unread) == 1
    assert f"refused {HOSTILE}: {unread[0]}" in said
    assert re.search(r"127\.0\.0\.1:1\b.*: the server stage runs in this process", said)
    deployed["refusals"] = [row for row in deployed["refusals"] if row[0] != HOSTILE]
    assert deployed == rehearse(tmp_path, nodes)
    assert [row["client"] for row in deployed["uploads"]] == CLIENTS
    assert [row["architecture"] for row in deployed["uploads"]] == ["lenet5", "resnet8", "resnet8-ds"]
    assert [row["num_examples"] is None for row in deployed["uploads"]] == [False, False, True]
    # The node without data has a model in the ensemble, and no part in the scores.
    assert deployed["refusals"] == []
    # Each hospital with data has its gain, from the first message to the page.
    scored = deployed["evaluation"]
    assert [row["client"] for row in scored["clients"]] == CLIENTS[:2]
    assert all(row["examples"] > 0 and row["own"] and row["gain"] for row in scored["clients"])
    assert scored["refused"] == [{"client": "hospital-c", "reason": TOO_FEW}]
    assert all(f"{name}: true classes" in page for name in CLIENTS[:2])


def assert_hears_nobody_else(heard: set[tuple[str, str]]) -> None:
    """Flower's processes wait for connections, and all on addresses that no other machine reaches."""
    assert heard
    assert {address for _, address in heard} <= LOOPBACK, heard


def assert_control_commands_are_local(here: Federation) -> None:
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert here.status("POST", path, source="127.0.0.2") == http.client.FORBIDDEN
        assert here.status("POST", path) != http.client.FORBIDDEN
    assert here.status("GET", "/health", source="127.0.0.2") == http.client.OK
    # Nodes come from everywhere, and are asked for their signatures.
    assert here.status("POST", "/v1/fleet/pull-messages", source="127.0.0.2") not in (None, http.client.FORBIDDEN)


def assert_is_kept_out(here: Federation, stranger: subprocess.Popen[bytes]) -> None:
    """A key opens nothing before it is registered, and nothing after it is taken back; between that, it does."""
    assert stranger.poll() not in (None, 0), here.logs()
    log = here.machines["stranger"].log
    assert "Failed to activate SuperNode" in log.read_text()
    assert not (here.machines["stranger"].folder / "state").exists(), "no run asked it"
    here.register("stranger")
    registered = here.node("stranger")
    here.until(lambda: active(here, "stranger"))
    (its_id,) = active(here, "stranger")
    here.server.call("flwr", "supernode", "unregister", its_id, "hospitals")
    assert online(here) == 4
    registered.kill()
    registered.wait()
    again = here.node("stranger")
    here.until(lambda: again.poll() is not None)
    assert again.returncode != 0


def active(here: Federation, name: str) -> list[str]:
    """Return the id that the SuperLink has given a node, once it has."""
    return re.findall(r"SuperNode ID: (\d+)", here.machines[name].log.read_text())


def online(here: Federation) -> int:
    listed = json.loads(here.server.call("flwr", "supernode", "list", "hospitals", "--format", "json"))
    return sum(node["status"] == "online" for node in listed["nodes"])


def deploy(here: Federation, heard: set[tuple[str, str]]) -> dict[str, Any]:
    """Run, and listen to the processes meanwhile."""
    run_dir = here.home / "server" / "runs" / "fedens"
    here.server.call("flwr", "run", str(app_copy()), "hospitals", "--run-config", f"{SETTINGS} run-dir='{run_dir}'")

    def finished() -> bool:
        heard.update(here.listening())
        return (run_dir / "result.json").exists()

    here.until(finished, pause_s=2.0)
    return facts_of(run_dir)


def logged(here: Federation) -> str:
    """Return the log of all runs, which the SuperLink keeps."""
    with contextlib.closing(sqlite3.connect(here.server.folder / "superlink.db")) as database:
        return "".join(text for (text,) in database.execute("SELECT log FROM task_logs ORDER BY rowid"))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rehearse(tmp_path: Path, nodes: Path) -> dict[str, Any]:
    """Run the same settings over the grid in this process."""
    run_dir = tmp_path / "rehearsals" / "fedens"
    command = ["run", "--local", "--run-config", SETTINGS, "--format", "json"]
    command += ["--run-config", f"client.nodes={nodes} run-dir={run_dir}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "rehearsals" / "state"))
        done = CliRunner().invoke(command_line.cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr[-4000:]
    assert json.loads((run_dir / "run.json").read_text())["num-supernodes"] == 3
    return facts_of(run_dir)


def facts_of(run_dir: Path) -> dict[str, Any]:
    """What must not depend on where the clients were."""
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished", result
    records = lines_of(run_dir / "uploads.jsonl")
    said = ("client", "architecture", "sha256", "num_examples", "label_counts", "pretrained", "ranges")
    return {
        "uploads": [{key: row.get(key) for key in said} for row in sorted(records, key=lambda row: row["client"])],
        "table": result["table"],
        "evaluation": result["evaluation"],
        "weights": result["weights_sha256"],
        "rounds": sorted(
            json.loads((run_dir / "traffic.json").read_text())["phases"].get("aggregator", {"up": {}})["up"]
        ),
        "refusals": sorted((row["client"], row["reason"]) for row in result["refusals"]),
    }
