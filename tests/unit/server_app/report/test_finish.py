from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import MakeRun, Stage, finished_in, replayed

from server_app.launch.result import print_result
from server_app.report.finish import table_lines
from strategies.core.durable import read_json
from strategies.core.facts import HEADLINES

KEYS = [
    "status", "run_dir", "method", "seed", "accuracy", "best_accuracy", "best_score", "table", "uploads", "refused",
    "refusals",
    "mib_up_per_client", "mib_down_per_client", "communication", "seconds", "work", "threads", "weights_sha256",
    "resumed_at", "plots", "metric", "scores", "details",
]  # fmt: skip


def test_named_classes_stand_in_the_result_its_card_and_its_page(run_folder: MakeRun, stage: Stage) -> None:
    path, (report, settings, images) = run_folder(), stage("fedavg")
    names = [f"creature {'abcdefghij'[k]}" for k in range(10)]
    result = finished_in(path, report, settings, replace(images, classes=tuple(names)))

    assert result["classes"] == read_json(path / "result.json")["classes"] == names
    assert "logits of 10 classes: 0 creature a, 1 creature b, " in (path / "model_card.md").read_text()
    columns = re.findall(r"<th[^>]*>(.*?)</th>", (path / "report.html").read_text())
    assert columns[columns.index(names[0]) :][:11] == [*names, "all"]


def test_a_plot_that_cannot_be_drawn_is_a_line(
    run_folder: MakeRun, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise ValueError("no such\ncolour")

    monkeypatch.setattr("server_app.report.plots.plot_scores", refused)
    lines = list[str]()
    result = finished_in(run_folder(), *stage("fedavg"), log=lines.append)

    assert result["plots"] == ["labels.png", "confusion.png", "recall.png", "reliability.png"]
    assert [line for line in lines if "plot" in line] == ["plot accuracy: not drawn, ValueError: no such colour"]


@pytest.mark.parametrize("method", ["dense", "fedens", "fedavg"])
def test_a_finished_run_has_a_result_with_exactly_the_agreed_keys(
    run_folder: MakeRun, stage: Stage, method: str
) -> None:
    path = run_folder()

    result = finished_in(path, *stage(method), clients=1.234, server=2.0, app=4.0)

    stored = read_json(path / "result.json")
    assert stored == json.loads(json.dumps(result))
    assert list(stored) == KEYS
    assert (stored["status"], stored["method"], stored["seed"], stored["run_dir"]) == ("finished", method, 0, str(path))
    assert all(row.keys() == {"name", "kind", "accuracy", "scores"} for row in stored["table"])
    assert {row["kind"] for row in stored["table"]} <= {"client", "baseline", "ensemble", "student"}
    assert stored["accuracy"] == stored["table"][-1]["accuracy"] <= stored["best_accuracy"]
    assert (stored["uploads"], stored["refused"], stored["resumed_at"]) == (3, 1, 0)
    assert stored["refusals"][0]["client"] == "node-7"
    seconds = stored["seconds"]
    assert (seconds["clients"], seconds["server"]) == (1.23, 2.0)
    # The scores and the report are a phase of their own, and part of the whole.
    assert seconds["evaluation"] > 0.0
    assert seconds["app"] == pytest.approx(4.0 + seconds["evaluation"], abs=0.02)
    assert len(stored["weights_sha256"]) == 64
    head, card = (path / "model_card.md").read_text().removeprefix("---\n").split("\n---\n\n", 1)
    assert card.startswith("# ")
    assert "Data: digits · split dirichlet-classes, alpha 0.3 · 3 clients · seed 0." in card
    read = yaml.safe_load(head)
    (model,) = read.pop("model-index")
    assert read == {
        "license": "other",
        "license_name": "chosen-by-the-owners-of-the-data",
        "library_name": "oneshot-fl",
        "pipeline_tag": "image-classification",
        "tags": ["federated-learning", "one-shot-federated-learning", "flower", stored["method"]],
        "metrics": list(stored["scores"]),
        "version": version("oneshot-fl"),
        "date": read_json(path / "run.json")["created"][:10],
    }
    (scored,) = model["results"]
    assert scored["dataset"] == {"type": "digits", "name": "digits"}
    assert scored["metrics"][0]["value"] == pytest.approx(stored["accuracy"] / 100, abs=1e-4)
    assert stored["scores"].keys() == set(HEADLINES)
    assert all(score["low"] <= score["value"] <= score["high"] for score in stored["scores"].values())
    assert sorted(stored["plots"]) == sorted(file.name for file in (path / "report").iterdir())


def test_a_result_that_nobody_scores_has_a_page_and_a_card_that_say_so(run_folder: MakeRun) -> None:
    result = replayed(run_folder(**{"evaluate.on": "none"}), "fedavg")

    place = Path(result["run_dir"])
    assert (result["accuracy"], result["scores"], result["table"]) == (None, {}, [])
    assert result["plots"] == ["labels.png"]
    page, card = (html.unescape((place / name).read_text()) for name in ("report.html", "model_card.md"))
    assert "no scores: 'evaluate.on' is 'none'" in page
    assert not re.search("on held-out examples|Accuracy on|<b>-", page)
    assert "Nobody knows yet how good it is." in card
    assert "held-out" not in card
    assert any(line.startswith("no scores: ") for line in table_lines(result))


def test_a_result_when_clients_were_private_names_the_guarantee(
    run_folder: MakeRun, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder()
    result = finished_in(path, *stage("fedens", **{"privacy.epsilon": 8.0, "client.share-label-counts": False}))

    line = "each client's upload is (8, 1e-05)-differentially private in its examples (DP-SGD, clip 1)"
    stored = read_json(path / "result.json")["privacy"]
    assert {key: stored[key] for key in ("epsilon", "delta", "clip")} == {"epsilon": 8.0, "delta": 1e-05, "clip": 1.0}
    assert any(said.startswith(f"privacy: {line}") for said in table_lines(result))
    assert f"Privacy: {line}" in (path / "model_card.md").read_text()
    print_result({**result, "refusals": []}, "text")
    assert f"privacy      {line}" in capsys.readouterr().out
