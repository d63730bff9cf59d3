"""The same app on a SuperLink with two SuperNodes: one trains, one holds a checkpoint of another model and no data."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fl_app.models import build
from server_app.guard import TOKEN_KEY, guarded

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SETTINGS = "client.epochs=2 data.image-size=8 threads=1 deadline-s=150"
METHODS = {
    "DENSE": "method='dense' dense.epochs=2 dense.generator-steps=2 dense.synthesis-batch-size=16 dense.latent=16",
    # Few, long rounds: each takes seconds here.
    "FENS": "method='fens' fens.aggregator='per-class' fens.rounds=2 fens.local-steps=20 fens.server-lr=0.1",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("method", METHODS)
def test_deployment_with_a_training_node_and_a_checkpoint_node_finishes(tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    checkpoint = tmp_path / "beta.safetensors"
    save_file(build("resnet8-ds", num_classes=10, input_shape=(1, 8, 8)).state_dict(), checkpoint)
    port, run_dir = free_port(), tmp_path / "run"
    nodes = [
        'partition-id=0 num-partitions=2 client="alpha"',
        f'client="beta" checkpoint="{checkpoint}" architecture="resnet8-ds"',
    ]
    with guarded() as (folder, token):
        environment = os.environ | {
            "FLWR_HOME": str(folder),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(folder),
            "ONESHOT_CLIENT_STATE": str(tmp_path / "clients"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            TOKEN_KEY: token,
        }

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            (tmp_path / name).mkdir(exist_ok=True)
            log = (tmp_path / f"{name}.log").open("w")
            return subprocess.Popen(
                command, cwd=tmp_path / name, env=environment, stdout=log, stderr=log, start_new_session=True
            )

        connection = f'[superlink]\ndefault = "dep"\n[superlink.dep]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (folder / "config.toml").write_text(connection)
        start("server", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        for number, node_config in enumerate(nodes):
            start(
                f"node-{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
                "--port", str(free_port()), "--node-config", node_config,
            )  # fmt: skip
        time.sleep(3.0)
        config = f"{METHODS[method]} {SETTINGS} run-dir='{run_dir}'"
        run = start("operator", "flwr", "run", str(ROOT), "dep", "--stream", "-c", config)
        deadline = time.monotonic() + 240
        while not (run_dir / "result.json").exists() and time.monotonic() < deadline:
            time.sleep(0.5)
        logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert (run_dir / "result.json").exists(), logs
        run.kill()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished", result
    assert [row["name"] for row in result["table"]] == ["alpha", "beta", "FedENS", method]
    records = [json.loads(line) for line in (run_dir / "uploads.jsonl").read_text().splitlines()]
    facts = {record["client"]: record for record in records}
    assert facts["beta"]["pretrained"] is True
    assert facts["beta"]["num_examples"] is None
    assert facts["alpha"]["architecture"] == "lenet5"
    assert facts["alpha"]["num_examples"] > 0
    if method == "FENS":
        traffic = json.loads((run_dir / "traffic.json").read_text())["phases"]
        assert traffic["aggregator"]["up"]["alpha"] > 0
        assert "beta" not in traffic["aggregator"]["up"]
        # The node without data has a model in the ensemble, and no part in the rounds.
        ((client, reason),) = [(row["client"], row["reason"]) for row in result["refusals"]]
        assert (client, reason) == ("beta", "it holds no examples: it takes no part in the rounds")
