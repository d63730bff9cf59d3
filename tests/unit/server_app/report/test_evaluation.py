from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from server_app.report.evaluation import Row, best_accuracy, evaluate, result_table
from server_app.settings.held_out import HeldOut
from strategies.combiners.combiners import Mean
from strategies.combiners.outcomes import load_model
from strategies.method import METHODS, EnsembleSpec
from strategies.teacher.ensemble import Ensemble

Stage = Callable[..., Any]


def score(report: Any, images: HeldOut, position: int) -> float:
    upload = report.job.uploads[position]
    model = report.job.builders[upload.architecture]()
    model.load_state_dict(upload.read())
    return images.accuracy(model)


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("fedavg", [("FedENS", "ensemble"), ("FedAvg (one shot)", "baseline")]),
        ("fedens", [("FedAvg (one shot)", "baseline"), ("FedENS", "ensemble")]),
        ("dw-fedens", [("FedAvg (one shot)", "baseline"), ("FedENS", "ensemble"), ("DW-FedENS", "ensemble")]),
        ("dense", [("FedAvg (one shot)", "baseline"), ("FedENS", "ensemble"), ("DENSE", "student")]),
    ],
)
def test_the_table_when_architectures_are_equal_has_clients_baselines_and_the_result(
    stage: Stage, method: str, rest: list[tuple[str, str]]
) -> None:
    report, _, images = stage(method)

    rows = result_table(report, method, images)

    assert [(row.name, row.kind) for row in rows[:3]] == [(f"client-00{k}", "client") for k in range(3)]
    assert [(row.name, row.kind) for row in rows[3:]] == rest
    assert [row.accuracy for row in rows[:3]] == [score(report, images, k) for k in range(3)]
    assert rows[-1].accuracy == images.accuracy(load_model(report.outcome, report.job))
    averaged = next(row for row in rows if row.name == "FedENS")
    assert averaged.accuracy == images.accuracy(Ensemble.from_uploads(report.job.uploads, report.job.builders, Mean()))


def test_the_table_when_architectures_differ_has_no_average_of_weights(stage: Stage) -> None:
    report, _, images = stage("label-count-ensemble", "lenet5", "mnist-cnn")

    rows = result_table(report, "label-count-ensemble", images)

    assert [(row.name, row.kind) for row in rows] == [
        ("client-000", "client"),
        ("client-001", "client"),
        ("FedENS", "ensemble"),
        (METHODS["label-count-ensemble"].title, "ensemble"),
    ]
    assert [row.accuracy for row in rows[:2]] == [score(report, images, k) for k in range(2)]


def test_the_table_when_a_method_ends_with_both_has_the_ensemble_before_the_student(stage: Stage) -> None:
    report, _, images = stage("dense")
    spec = EnsembleSpec(("client-000", "client-002"), "weighted", {"weights": torch.tensor([1.0, 3.0])})
    both = replace(report, outcome=replace(report.outcome, ensemble=spec))

    rows = result_table(both, "dense", images)

    assert [(row.name, row.kind) for row in rows[-2:]] == [("DENSE ensemble", "ensemble"), ("DENSE", "student")]
    ensemble = load_model(replace(both.outcome, student=None), both.job)
    assert rows[-2].accuracy == images.accuracy(ensemble)
    assert rows[-1].accuracy == images.accuracy(load_model(report.outcome, report.job))


def test_the_best_accuracy_is_that_of_the_epochs_or_the_last() -> None:
    assert best_accuracy([{"epoch": 1, "accuracy": 70.0}, {"epoch": 2, "accuracy": 60.0}, {"note": "x"}], 60.0) == 70.0
    assert best_accuracy([], 60.0) == 60.0


def test_a_row_when_written_has_the_keys_of_the_result_file() -> None:
    assert Row("a", "client", 1.5).as_json() == {"name": "a", "kind": "client", "accuracy": 1.5}


@pytest.mark.parametrize("method", ["fedavg", "fedens", "dw-fedens", "dense"])
@pytest.mark.parametrize("architectures", [("lenet5",) * 3, ("lenet5", "mnist-cnn", "lenet5")])
def test_an_evaluation_counts_to_its_end_and_gives_the_table(
    stage: Stage, method: str, architectures: tuple[str, ...]
) -> None:
    if method == "fedavg" and len(set(architectures)) > 1:
        pytest.skip("FedAvg refuses several architectures")
    report, _, images = stage(method, *architectures)
    lines: list[str] = []

    rows = evaluate(report, method, images, log=lines.append)

    assert rows == result_table(report, method, images)
    step, total = re.fullmatch(r"evaluation: batch (\d+) of (\d+), \d+ s elapsed", lines[-1]).groups()  # type: ignore[union-attr]
    assert step == total
