"""Runs and comparisons as a table for pandas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from strategies import results
from strategies.run.results import COLUMNS


def written(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    settings = {"data.name": "digits", "data.partition": "iid", "data.alpha": 0.3}
    for seed, accuracy in enumerate((80.0, 90.0)):
        info = {"created": f"2026-01-0{2 - seed}", "method": "tally", "seed": seed, "settings": settings}
        total = {"mib_up_per_client": 0.5, "mib_down_per_client": 0.25}
        table = [{"name": "client-000", "kind": "client"}, {"name": "Tally", "kind": "student"}]
        result = {
            "status": "finished", "accuracy": accuracy, "best_accuracy": 91.0, "uploads": 3, "table": table,
            "seconds": {"server": 4.0}, "communication": {"total": total}, "weights_sha256": "ab",
        }  # fmt: skip
        written(tmp_path / f"run-{seed}", run=info, result=result)
    written(tmp_path / "begun", run={"created": "2026-01-03", "method": "dense", "seed": 0, "num-supernodes": 5})
    written(tmp_path / "torn", run="{")
    outcomes = [{"name": "Tally ensemble", "kind": "ensemble", "accuracy": 85.0},
                {"name": "Tally", "kind": "student", "accuracy": 84.0}]  # fmt: skip
    cell = {
        "run": str(tmp_path / "run-0"), "method": "tally", "seed": 7, "outcomes": outcomes, "best_accuracy": 86.0,
        "uploads": 3, "server_s": 2.5, "weights_sha256": "cd",
    }  # fmt: skip
    written(tmp_path / "compared", compare={"data": "digits", "cells": [cell]})
    written(tmp_path / "unfinished", compare={"data": "digits"})
    return tmp_path


def test_results_hold_a_row_for_each_run_and_each_result_of_a_comparison(runs: Path) -> None:
    found = results(runs)

    assert list(found.columns) == list(COLUMNS)
    assert found["run"].tolist() == ["run-1", "run-0", "begun", "run-0", "run-0"]
    assert found["kind"].tolist() == ["run", "run", "run", "comparison", "comparison"]
    own = found[found["run"] == "run-1"].iloc[0].to_dict()
    assert (own["result"], own["partition"], own["alpha"], own["clients"]) == ("Tally", "iid", 0.3, 3)
    assert (own["server_s"], own["mib_per_client"], own["weights_sha256"]) == (4.0, 0.75, "ab")
    cells = found[found["comparison"] == "compared"]
    assert cells["result"].tolist() == ["Tally ensemble", "Tally"]
    assert cells["seed"].tolist() == [7, 7]
    assert cells[["partition", "alpha"]].values.tolist() == [["iid", 0.3]] * 2
    assert pd.isna(cells["best_accuracy"].iloc[0])
    assert cells["best_accuracy"].iloc[1] == 86.0


def test_results_without_a_folder_are_those_of_the_usual_place(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONESHOT_RUNS", str(runs))
    assert len(results()) == 5
    monkeypatch.setenv("ONESHOT_RUNS", str(runs / "absent"))
    assert results().empty
    assert list(results().columns) == list(COLUMNS)
