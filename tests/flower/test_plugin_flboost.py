"""A Flower project of someone else, with stock client and strategy, whose strategy line alone is now FLBoost."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_plugin import CLIENT, write_project

from strategies import simulate
from strategies.run.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.ray]

CLIENTS = 4
STOCK = "strategy = FedAvgM(fraction_train=0.5, server_momentum=0.9)"
SERVER = """
import json
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvgM
from strategies import FLBoost, Refiner

from hospital.data import images_and_labels
from hospital.model import Net

app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    images, labels = images_and_labels(4, 5)
    notes = Path(context.run_config["notes"])

    def evaluate(server_round, arrays):
        if server_round == 2 and (notes / "die").exists():
            os.remove(notes / "die")
            raise RuntimeError("as if the process had been killed")
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            return MetricRecord({"accuracy": float((model.eval()(images).argmax(1) == labels).float().mean())})

    strategy = FedAvgM(fraction_train=0.5, server_momentum=0.9)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=3,
        evaluate_fn=evaluate,
    )
    Net().load_state_dict(result.arrays.to_torch_state_dict())
    parts = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    facts = {part: {k: dict(v) for k, v in getattr(result, part).items()} for part in parts}
    (notes / "server.json").write_text(json.dumps(facts))
"""
WRAPPED = """strategy = FLBoost(
        Net, base=FedAvgM(fraction_train=0.5, server_momentum=0.9), num_classes=10, input_shape=(1, 8, 8),
        run_dir=context.run_config["run-dir"], compute="in-process",
        refiner=Refiner.of("flboost", iterations=2, batch_size=16),
    )"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    assert SERVER.count(STOCK) == 1
    folder = write_project(tmp_path / "project", CLIENT, SERVER.replace(STOCK, WRAPPED))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "hospital"]:
        del sys.modules[name]


def asked(notes: Path, kind: str) -> list[str]:
    """Which partitions were asked in which round."""
    return sorted(path.name for path in notes.glob(f"{kind}-*"))


def test_foreign_strategy_is_refined_and_resumed(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ended in round 2 and resumed behind new node ids: every round has its clients once."""
    run_dir, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    (notes / "die").touch()
    server_app, client_app = (importlib.import_module(f"hospital.{half}").app for half in ("server", "client"))
    settings = {"run-dir": str(run_dir), "notes": str(notes), "lr": 0.05}
    with pytest.raises(RuntimeError, match="as if the process had been killed"):
        simulate(server_app, client_app, clients=CLIENTS, run_config=settings)
    first = asked(notes, "train")
    simulate(server_app, client_app, clients=CLIENTS, run_config=settings)

    # Flower's result: half of the clients train, all evaluate, the server tests from round 0 on.
    facts: dict[str, Any] = json.loads((notes / "server.json").read_text())
    trained = asked(notes, "train")
    assert first == trained[:4]
    assert [name.split("-")[1] for name in trained] == ["1", "1", "2", "2", "3", "3"]
    assert len(asked(notes, "evaluate")) == 3 * CLIENTS
    assert sorted(facts["evaluate_metrics_serverapp"]) == ["0", "1", "2", "3"]
    assert sorted(facts["evaluate_metrics_clientapp"]) == sorted(facts["train_metrics_clientapp"]) == ["1", "2", "3"]
    for scores in facts["evaluate_metrics_clientapp"].values():
        assert 0.0 <= scores["accuracy"] <= 1.0
    assert any("their nodes' order of registration stands for them" in line for line in caplog.messages)

    with RunFolder.open(run_dir, write=False) as stored:
        assert stored.info["base"] == "FedAvgM"
        assert stored.info["base.server_momentum"] == 0.9
        assert stored.info["config"]["refiner"] == "flboost"
        assert [row["answers"] for row in stored.round(1).metrics()] == [2, 2, 2]
        assert all("clients_accuracy" in row for row in stored.round(1).metrics())
        assert stored.round(1).refused() == []
        assert stored.student() is not None
