from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import Stage

from fl_app.models import build
from server_app.report.evaluation import result_table
from server_app.settings.build import build_job, held_out
from server_app.settings.read import read_settings
from server_app.settings.server_data import HeldOut
from strategies.combiners.combiners import Mean
from strategies.combiners.outcomes import load_model
from strategies.core.seeds import seeded_torch
from strategies.method import METHODS, EnsembleSpec, Outcome, Silent
from strategies.run.stage import StageReport
from strategies.teacher.ensemble import Ensemble


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
        ("dense", [("FedAvg (one shot)", "baseline"), ("FedENS", "ensemble"), ("DENSE (2 epochs of 200)", "student")]),
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


def test_fedavg_beside_another_method_is_the_one_that_the_settings_name(stage: Stage) -> None:
    report, _, images = stage("fedens")
    methods = {"examples": METHODS["fedavg"].config(), "uniform": METHODS["fedavg"].config(weights="uniform")}

    for config in methods.values():
        own = METHODS["fedavg"].fit(replace(report.job, config=config), Silent())
        (row,) = (r for r in result_table(report, "fedens", images, averaging=config) if r.name == "FedAvg (one shot)")
        assert row.scores == images.scored(load_model(own, report.job))["scores"]


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

    assert [(row.name, row.kind) for row in rows[-2:]] == [
        ("DENSE ensemble", "ensemble"),
        ("DENSE (2 epochs of 200)", "student"),
    ]
    ensemble = load_model(replace(both.outcome, student=None), both.job)
    assert rows[-2].accuracy == images.accuracy(ensemble)
    assert rows[-1].accuracy == images.accuracy(load_model(report.outcome, report.job))


def test_the_table_of_rounds_has_the_last_model_alone() -> None:
    settings = read_settings(
        {"method": "iterative", "iterative.rounds": 3, "iterative.strategy": "scaffold", "device": "cpu"}
    )
    images, split = held_out(settings)
    with seeded_torch(0):
        state = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict()
    report = StageReport(Outcome(student=dict(state)), build_job(settings, split, images), 0, 0.0)
    (row,) = result_table(report, "iterative", images)
    assert (row.name, row.kind) == ("SCAFFOLD, 3 rounds", "baseline")
    assert 0.0 <= row.accuracy <= 40.0
