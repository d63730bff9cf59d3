"""Projects in the forms of Flower's examples, with the strategy changed and nothing else."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from flower_fakes import Client, FakeGrid, records, stock, strategy, weights
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord
from flwr.cli.build import build_fab_from_disk

from strategies import OneShotFedAvg
from strategies.run.files import read_json
from strategies.run.results import list_runs

PROJECT = """
[project]
name = "project"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "task:server"
clientapp = "task:client"
"""
TWO = FakeGrid({1: stock(1), 2: stock(2)})


def test_a_run_does_not_travel_with_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project := tmp_path / "project").mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "task.py").touch()
    monkeypatch.chdir(project)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = strategy(OneShotFedAvg, None)
    run.start(TWO)  # type: ignore[arg-type]

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(project))) as fab:
        assert sorted(fab.namelist()) == [".info/CONTENT", "pyproject.toml", "task.py"]
    assert (tmp_path / "state" / "oneshot-fl" / "runs") == run.folder.path.parent


def test_scores_are_logged_and_kept_as_flower_does(tmp_path: Path, said: list[str]) -> None:
    def client(seed: int) -> Client:
        def answer(message: Message) -> Message:
            if message.metadata.message_type == MessageType.TRAIN:
                return Message(records(weights(seed), train_loss=0.25), reply_to=message)
            return Message(records(None, eval_acc=0.75), reply_to=message)

        return answer

    run = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=1.0)
    result = run.start(
        FakeGrid({1: client(1), 2: client(2)}),  # type: ignore[arg-type]
        ArrayRecord(weights(5)),
        evaluate_fn=lambda number, _: MetricRecord({"accuracy": 0.1 + number}),
    )
    parts = {
        "train_metrics_clientapp": {"1": {"train_loss": 0.25}},
        "evaluate_metrics_clientapp": {"1": {"eval_acc": 0.75}},
        "evaluate_metrics_serverapp": {"0": {"accuracy": 0.1}, "1": {"accuracy": 1.1}},
    }
    stored, card = read_json(tmp_path / "run" / "flower_result.json"), (tmp_path / "run" / "model_card.md").read_text()
    assert {part: stored[part] for part in parts} == parts
    assert [row["status"] for row in list_runs(tmp_path)] == ["finished"]
    assert {part: {str(n): r for n, r in getattr(result, part).items()} for part in parts} == parts
    text = "\n".join(said)
    for name, value in (("train_loss", 0.25), ("eval_acc", 0.75), ("accuracy", 0.1), ("accuracy", 1.1)):
        assert f"'{name}': {value}" in text
        assert f"{name} = {value}" in card
    assert "Final results:" in text
