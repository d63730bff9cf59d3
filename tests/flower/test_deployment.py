"""The same app on a SuperLink with two SuperNodes: one trains, one holds a checkpoint of another model and no data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deployments import deployment
from safetensors.torch import save_file

from fl_app.models import build

pytestmark = pytest.mark.slow

SETTINGS = "client.epochs=2 data.image-size=8 threads=1 deadline-s=150"
METHODS = {
    "DENSE": "method='dense' dense.epochs=2 dense.generator-steps=2 dense.synthesis-batch-size=16 dense.latent=16",
    # Few, long rounds: each takes seconds here.
    "FENS": "method='fens' fens.aggregator='per-class' fens.rounds=2 fens.local-steps=20 fens.server-lr=0.1",
}


@pytest.mark.parametrize("method", METHODS)
def test_deployment_with_a_training_node_and_a_checkpoint_node_finishes(tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    checkpoint = tmp_path / "beta.safetensors"
    save_file(build("resnet8-ds", num_classes=10, input_shape=(1, 8, 8)).state_dict(), checkpoint)
    run_dir = tmp_path / "run"
    with deployment(tmp_path) as here:
        here.node("node-0", 'partition-id=0 num-partitions=2 client="alpha"')
        here.node("node-1", f'client="beta" checkpoint="{checkpoint}" architecture="resnet8-ds"')
        here.run(f"{METHODS[method]} {SETTINGS} run-dir='{run_dir}'")
        here.until((run_dir / "result.json").exists)
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished", result
    exact = ["FENS, members in float32"] if method == "FENS" else []  # what its members lose in int8 is shown
    assert [row["name"] for row in result["table"]] == ["alpha", "beta", "FedENS", *exact, method]
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
