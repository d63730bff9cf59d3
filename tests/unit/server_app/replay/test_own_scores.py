"""Runs of another project whose own function scores the models: results, cards and reports like ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import compared, foreign_run, replayed, run_card
from torch import nn

from server_app.compare.report import lines_of, table_of
from strategies.core.durable import read_json
from strategies.core.errors import OptionError

CODE = """
import torch
from torch import nn

KEYS = torch.tensor([[5.0] * 8 + [0.0] * 8, [0.0] * 8 + [5.0] * 8]).reshape(2, 1, 4, 4)


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def score(model):
    assert not model.training
    assert not torch.is_grad_enabled()
    return 100.0 * float((model(KEYS).argmax(1) == torch.tensor([0, 1])).float().mean())


def scores(model):
    return {"accuracy": score(model), "loss": 0.5}


def fails(model):
    raise ValueError("no test\\ndata")


share = lambda model: "most"
above = lambda model: 101.0
nothing = lambda model: None
number = 3
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "scored_net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("scored_net", None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as another project leaves it: client a knows the classes, client b confuses them."""
    clear = torch.tensor([[1.0] * 8 + [-1.0] * 8, [-1.0] * 8 + [1.0] * 8])
    uploads = {
        client: ("model", {"1.weight": sign * clear, "1.bias": torch.zeros(2)})
        for client, sign in (("a", 3.0), ("b", -1.0))
    }
    return foreign_run(tmp_path / "runs" / "run", uploads, **{"num-classes": 2})


OWN: dict[str, Any] = {"model": "scored_net:net", "evaluate": "scored_net:score"}


@pytest.mark.parametrize("evaluate", ["scored_net:score", "scored_net:scores"])
def test_a_scored_replay_has_a_table_a_card_and_a_page(run: Path, evaluate: str) -> None:
    lines: list[str] = []
    result = replayed(run, "fedens", **{**OWN, "evaluate": evaluate}, log=lines.append)

    shown = [line.split()[2:5:2] for line in lines if line.startswith("evaluation: batch")]
    assert shown[-1] == ["5", "5,"]  # a and b, their ensemble of two, FedAvg
    assert [(row["name"], row["accuracy"]) for row in result["table"]] == [
        ("a", 100.0), ("b", 0.0), ("FedAvg (one shot)", 100.0), ("FedENS", 100.0)
    ]  # fmt: skip
    assert result["accuracy"] == 100.0
    folder = Path(result["run_dir"])
    assert read_json(folder / "run.json")["evaluate"] == evaluate
    assert "100.00" in (folder / "report.html").read_text()
    assert (folder / "report" / "accuracy.png").exists()


@pytest.mark.parametrize("method", ["fedens", "fedavg"])
def test_the_card_loads_the_result_by_the_own_model(run: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(replayed(run, method, **OWN)["run_dir"])
    monkeypatch.syspath_prepend(str(Path.cwd()))

    found = run_card(folder)

    assert "from scored_net import net" in (folder / "model_card.md").read_text()
    assert isinstance(found["model"], nn.Module)
    assert found["model"](torch.zeros(3, 1, 4, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    ("evaluate", "reason"),
    [
        ("scored_net:fails", "--evaluate 'scored_net:fails' fails: ValueError: no test data"),
        ("scored_net:share", "returns most: must return the accuracy in %, 0 to 100, or a dict"),
        ("scored_net:above", r"returns 101\.0: must return the accuracy in %"),
        ("scored_net:nothing", "returns None: must return the accuracy in %"),
        ("scored_net:number", "--evaluate is 'scored_net:number', which is int: must be a function"),
        ("scored_net:absent", "module 'scored_net' has no 'absent'"),
        ("score", "--evaluate is 'score': must be module:attribute"),
    ],
)
def test_a_wrong_function_is_refused_in_one_line(run: Path, evaluate: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        replayed(run, "fedens", **{**OWN, "evaluate": evaluate})
    assert list(run.parent.iterdir()) == [run]


@pytest.mark.slow
def test_runs_of_another_project_are_compared_with_its_scores(run: Path, tmp_path: Path) -> None:
    found = compared(run, **OWN, out=tmp_path / "compared")

    assert found["status"] == "finished", found.get("error")
    lines = lines_of(found["cells"])
    assert [line.accuracy for line in lines] == [100.0]
    assert "--evaluate scored_net:score" in found["command"]
    assert any(note.startswith("Accuracy on held-out examples") for note in table_of(found, lines).notes)
    assert found["plot"] == "comparison.png"
