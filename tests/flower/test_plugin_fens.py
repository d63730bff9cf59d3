"""FENS in somebody else's Flower project: another strategy on the server, two lines in the ClientApp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_plugin import CLIENT, CLIENTS, DATA, MODEL, PYPROJECT, run

from strategies.run.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TWO_LINES = """
from strategies.client import fens


def held(context):
    images, labels = images_and_labels(context.node_config["partition-id"], context.node_config["num-partitions"] + 1)
    return images[-40:], labels[-40:]


fens.serve(app, model=Net, examples=held, client=lambda context: f"ward-{context.node_config['partition-id']}")
"""
SERVER = """
import json
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from strategies import Fens, FensConfig

from hospital.data import images_and_labels
from hospital.model import Net

app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    images, labels = images_and_labels(3, 4)

    def score(model):
        with torch.no_grad():
            return {"accuracy": float((model(images).argmax(1) == labels).float().mean())}

    config = FensConfig(aggregator="per-class", rounds=20, server_lr=0.05)
    strategy = Fens(
        Net, num_classes=10, input_shape=(1, 8, 8), config=config, run_dir=context.run_config["run-dir"],
        evaluate_model=score,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
    )
    facts = {
        "accuracy": result.evaluate_metrics_serverapp[1]["accuracy"],
        "outcome": type(strategy.outcome).__name__,
        "arrays": len(result.arrays),
    }
    Path(context.run_config["notes"], "server.json").write_text(json.dumps(facts))
"""


def test_plugin_of_fens_needs_two_lines_of_the_client_and_ends_with_a_good_ensemble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "clients"))
    folder = tmp_path / "project"
    (folder / "hospital").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    sources = {"__init__": "", "model": MODEL, "data": DATA, "client": CLIENT + TWO_LINES, "server": SERVER}
    for name, source in sources.items():
        (folder / "hospital" / f"{name}.py").write_text(source)

    facts, lines = run(folder, tmp_path / "run", tmp_path / "notes")

    assert facts["outcome"] == "Ensemble"
    assert facts["arrays"] == 0
    assert facts["accuracy"] > 0.6, facts  # ten classes, and every client saw them all
    assert any("fens: round 20 of 20" in line for line in lines)
    with RunFolder.open(tmp_path / "run", write=False) as stored:
        assert len(stored.round(1).uploads()) == CLIENTS
        assert stored.round(1).refused() == []
    traffic = json.loads((tmp_path / "run" / "traffic.json").read_text())["phases"]
    assert set(traffic) == {"upload", "ensemble", "aggregator"}
    assert set(traffic["aggregator"]["up"]) == {"ward-0", "ward-1", "ward-2"}
    # Each keeps the logits of the one ensemble on its disk.
    assert len(list((tmp_path / "clients").rglob("ward-*-ensembles-*/*.npz"))) == CLIENTS
