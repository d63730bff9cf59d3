"""A Flower project of someone else, with its own Net and ClientApp, under two strategies in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_copy import pyproject

from server_app.launch.superlink import launch
from strategies.run.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.ray]

CLIENTS = 3
PYPROJECT = pyproject("hospital.server:app", "hospital.client:app", 'run-dir = ""\nnotes = ""\nlr = 0.05\n')
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
torch.set_num_threads(1)


def opened(msg, context, kind):
    partition, number = context.node_config["partition-id"], msg.content["config"]["server-round"]
    Path(context.run_config["notes"], f"{kind}-{number}-{partition}-{os.getpid()}").touch()
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model, *images_and_labels(partition, context.node_config["num-partitions"] + 1)


@app.train()
def train(msg, context):
    torch.manual_seed(context.node_config["partition-id"])
    model, images, labels = opened(msg, context, "train")
    optimizer = torch.optim.SGD(model.parameters(), msg.content["config"]["lr"], momentum=0.9)
    for _ in range(msg.content["config"].get("epochs", 1)):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    model, images, labels = opened(msg, context, "evaluate")
    with torch.no_grad():
        accuracy = float((model.eval()(images).argmax(1) == labels).float().mean())
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
"""
TWO_LINES_OF_FENS = """
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
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from strategies import Dense, DenseConfig, Fens, FensConfig

from hospital.data import images_and_labels
from hospital.model import Net

app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    images, labels = images_and_labels(3, 4)
    rounds = []

    def score(model):
        with torch.no_grad():
            return {"accuracy": float((model.eval()(images).argmax(1) == labels).float().mean())}

    def evaluate(server_round, arrays):
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        rounds.append(server_round)
        return MetricRecord(score(model))

    def start(strategy, **more):
        arrays, asked = ArrayRecord(Net().state_dict()), ConfigRecord({"lr": context.run_config["lr"], "epochs": 5})
        return strategy.start(grid=grid, initial_arrays=arrays, train_config=asked, **more)

    own, run_dir = {"num_classes": 10, "input_shape": (1, 8, 8)}, context.run_config["run-dir"]
    config = DenseConfig(epochs=3, generator_steps=2, latent=8, synthesis_batch_size=16, batch_size=16)
    dense = Dense(Net, config=config, run_dir=f"{run_dir}/dense", compute="ray", **own)
    result = start(dense, num_rounds=5, evaluate_fn=evaluate)
    Net().load_state_dict(result.arrays.to_torch_state_dict())

    config = FensConfig(aggregator="per-class", rounds=20, server_lr=0.05)
    fens = Fens(Net, config=config, run_dir=f"{run_dir}/fens", evaluate_model=score, **own)
    ensemble = start(fens)
    facts = {
        "pid": os.getpid(),
        "rounds": rounds,
        "accuracy": {k: v["accuracy"] for k, v in result.evaluate_metrics_serverapp.items()},
        "outcome": type(dense.outcome).__name__,
        "fens": ensemble.evaluate_metrics_serverapp[1]["accuracy"],
        "fens outcome": type(fens.outcome).__name__,
        "fens arrays": len(ensemble.arrays),
    }
    Path(context.run_config["notes"], "server.json").write_text(json.dumps(facts))
"""


def write_project(folder: Path, client: str, server: str) -> Path:
    """Write somebody's project with its package ``hospital``."""
    (folder / "hospital").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    sources = {"__init__": "", "model": MODEL, "data": DATA, "client": client, "server": server}
    for name, source in sources.items():
        (folder / "hospital" / f"{name}.py").write_text(source)
    return folder


def test_two_strategies_in_a_foreign_project_run_and_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One needs nothing of the ClientApp, and FENS two lines; that a run resumes is asked in test_plugin_flboost.py."""
    builds, notes, lines = tmp_path / "builds", tmp_path / "notes", list[str]()
    notes.mkdir()
    monkeypatch.setenv("HOSPITAL_BUILDS", str(builds))
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "clients"))
    project = write_project(tmp_path / "project", CLIENT + TWO_LINES_OF_FENS, SERVER)
    settings = {"run-dir": str(tmp_path / "runs"), "notes": str(notes)}

    launched = launch(project, settings=settings, num_supernodes=CLIENTS, echo=lines.append, at_once=1)

    assert (launched.exit_code, launched.run_status) == (0, "finished:completed"), (launched.reason, lines)
    facts: dict[str, Any] = json.loads((notes / "server.json").read_text())

    assert facts["rounds"] == [0, 1]
    assert set(facts["accuracy"]) == {"0", "1"}
    assert all(0.0 <= accuracy <= 1.0 for accuracy in facts["accuracy"].values())
    assert facts["outcome"] == "Net"
    assert any("num_rounds=5 is ignored" in line for line in lines)

    # Every client was asked once by each; a process that is neither a client's nor the server's built the model too.
    trained = [path.name.split("-") for path in notes.glob("train-*")]
    assert {part for *_, part, _ in trained} == {"0", "1", "2"}
    clients = {int(pid) for *_, pid in trained}
    assert {int(pid) for pid in builds.read_text().split()} - {facts["pid"]} - clients
    assert not any("runs in this process" in line for line in lines)

    with RunFolder.open(tmp_path / "runs" / "dense", write=False) as stored:
        assert stored.info["method"] == "dense"
        assert stored.info["config"]["epochs"] == 3
        uploads = stored.round(1).uploads()
        assert [upload.architecture for upload in uploads] == ["model"] * CLIENTS
        assert sum(upload.num_examples or 0 for upload in uploads) in range(1300, 1400)
        assert stored.round(1).refused() == []
        assert [row["epoch"] for row in stored.round(1).metrics() if "epoch" in row] == [1, 2, 3]
        assert stored.student() is not None
        assert stored.images() is not None

    assert facts["fens outcome"] == "Ensemble"
    assert facts["fens arrays"] == 9  # of the uploads' average: the ensemble is in the run folder
    assert facts["fens"] > 0.6, facts  # ten classes, and every client saw them all
    assert any("fens: round 20 of 20" in line for line in lines)
    with RunFolder.open(tmp_path / "runs" / "fens", write=False) as stored:
        assert len(stored.round(1).uploads()) == CLIENTS
        assert stored.round(1).refused() == []
    traffic = json.loads((tmp_path / "runs" / "fens" / "traffic.json").read_text())["phases"]
    assert set(traffic) == {"upload", "ensemble", "aggregator"}
    assert set(traffic["aggregator"]["up"]) == {"ward-0", "ward-1", "ward-2"}
    # Each keeps the logits of the one ensemble on its disk.
    assert len(list((tmp_path / "clients").rglob("ward-*-ensembles-*/*.npz"))) == CLIENTS
