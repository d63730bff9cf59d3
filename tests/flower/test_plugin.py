"""A Flower project of someone else, with its own Net and a stock ClientApp, in which one line was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server_app.launch.superlink import launch
from strategies.run.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.ray]

CLIENTS = 3
PYPROJECT = """
[project]
name = "hospital"
version = "1.0.0"
description = "Somebody's own project."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "hospital.server:app"
clientapp = "hospital.client:app"
[tool.flwr.app.config]
run-dir = ""
notes = ""
lr = 0.05
"""
MODEL = """
import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 4 * 4, 10)
        if "HOSPITAL_BUILDS" in os.environ:  # for the test: which processes build the model
            with open(os.environ["HOSPITAL_BUILDS"], "a") as file:
                file.write(f"{os.getpid()}\\n")

    def forward(self, x):
        return self.head(self.features(x).flatten(1))
"""
DATA = """
import torch
from sklearn.datasets import load_digits


def images_and_labels(part, parts):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images[part::parts], torch.tensor(digits.target)[part::parts]
"""
CLIENT = """
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hospital.data import images_and_labels
from hospital.model import Net

app = ClientApp()


@app.train()
def train(msg, context):
    partition = context.node_config["partition-id"]
    torch.manual_seed(partition)
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    images, labels = images_and_labels(partition, context.node_config["num-partitions"] + 1)
    optimizer = torch.optim.SGD(model.parameters(), msg.content["config"]["lr"], momentum=0.9)
    for _ in range(5):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    Path(context.run_config["notes"], f"trained-{partition}-{os.getpid()}").touch()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(RecordDict(content), reply_to=msg)
"""
SERVER = """
import json
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from strategies import Dense, DenseConfig

from hospital.data import images_and_labels
from hospital.model import Net

app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    images, labels = images_and_labels(3, 4)
    rounds = []

    def evaluate(server_round, arrays):
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        rounds.append(server_round)
        with torch.no_grad():
            return MetricRecord({"accuracy": float((model.eval()(images).argmax(1) == labels).float().mean())})

    config = DenseConfig(epochs=3, generator_steps=2, latent=8, synthesis_batch_size=16, batch_size=16)
    strategy = Dense(Net, num_classes=10, input_shape=(1, 8, 8), config=config, run_dir=context.run_config["run-dir"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=5,
        evaluate_fn=evaluate,
    )
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    facts = {
        "pid": os.getpid(),
        "rounds": rounds,
        "accuracy": {k: v["accuracy"] for k, v in result.evaluate_metrics_serverapp.items()},
        "outcome": type(strategy.outcome).__name__,
    }
    Path(context.run_config["notes"], "server.json").write_text(json.dumps(facts))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "hospital").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    sources = {"__init__": "", "model": MODEL, "data": DATA, "client": CLIENT, "server": SERVER}
    for name, source in sources.items():
        (folder / "hospital" / f"{name}.py").write_text(source)
    return folder


def run(project: Path, run_dir: Path, notes: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the project; return what its ServerApp noted, and the log."""
    notes.mkdir()
    lines: list[str] = []
    settings = {"run-dir": str(run_dir), "notes": str(notes)}
    launched = launch(project, settings=settings, num_supernodes=CLIENTS, echo=lines.append)
    assert (launched.exit_code, launched.run_status) == (0, "finished:completed"), (launched.reason, lines)
    facts: dict[str, Any] = json.loads((notes / "server.json").read_text())
    return facts, lines


def test_plugin_in_a_foreign_project_runs_stores_and_resumes(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, builds = tmp_path / "run", tmp_path / "builds"
    monkeypatch.setenv("HOSPITAL_BUILDS", str(builds))
    facts, lines = run(project, run_dir, tmp_path / "first")

    assert facts["rounds"] == [0, 1]
    assert set(facts["accuracy"]) == {"0", "1"}
    assert all(0.0 <= accuracy <= 1.0 for accuracy in facts["accuracy"].values())
    assert facts["outcome"] == "Net"
    assert any("num_rounds=5 is ignored" in line for line in lines)

    # Every client was asked once; then the model was built in a process that is neither a client's nor the server's.
    trained = [path.name.split("-") for path in (tmp_path / "first").glob("trained-*")]
    assert sorted(part for _, part, _ in trained) == ["0", "1", "2"]
    others = {int(pid) for pid in builds.read_text().split()} - {facts["pid"], *(int(pid) for *_, pid in trained)}
    assert len(others) == 1
    assert not any("runs in this process" in line for line in lines)

    with RunFolder.open(run_dir, write=False) as stored:
        assert stored.info["method"] == "dense"
        assert stored.info["config"]["epochs"] == 3
        uploads = stored.round(1).uploads()
        assert [upload.architecture for upload in uploads] == ["model"] * CLIENTS
        assert sum(upload.num_examples or 0 for upload in uploads) in range(1300, 1400)
        assert stored.round(1).refused() == []
        assert [row["epoch"] for row in stored.round(1).metrics()] == [1, 2, 3]
        assert stored.student() is not None
        assert stored.images() is not None
    outcome = json.loads((run_dir / "outcome.json").read_text())

    # As if its process had died at the end of the server stage, before the outcome was written.
    (run_dir / "outcome.json").unlink()
    (run_dir / "student.safetensors").unlink()
    again, _ = run(project, run_dir, tmp_path / "second")
    assert list((tmp_path / "second").glob("trained-*")) == []
    assert again["accuracy"] == facts["accuracy"]
    assert json.loads((run_dir / "outcome.json").read_text())["weights-sha256"] == outcome["weights-sha256"]
