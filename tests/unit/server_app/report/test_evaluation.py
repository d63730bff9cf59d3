from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fl_app.data import ImageData
from server_app.report import evaluation
from server_app.report.evaluation import HeldOut, Row, best_accuracy, evaluate, percent, result_table
from strategies.combiners.combiners import Mean, Weighted
from strategies.combiners.outcomes import load_model
from strategies.method import METHODS, EnsembleSpec, Normalization
from strategies.teacher.ensemble import Ensemble

Stage = Callable[..., Any]


class Brightest(nn.Module):
    """Says the class whose pixel is the brightest, of images [B, 1, 1, C]."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = nn.Parameter(torch.tensor(sign))
        self.modes: list[bool] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.modes.append(self.training)
        return self.sign * images.flatten(1)


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> HeldOut:
    """Return seven images of three pixels; the brightest pixel is the label of the first four only."""
    monkeypatch.setattr(evaluation, "BATCH", 3)
    bright = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    images = torch.full((7, 1, 1, 3), 10, dtype=torch.uint8)
    images[torch.arange(7), 0, 0, bright] = 200
    labels = torch.tensor([0, 1, 2, 0, 2, 0, 1])
    return HeldOut(ImageData(images, labels), Normalization((0.5,), (0.5,)))


@pytest.mark.parametrize("mode", [True, False])
def test_accuracy_when_counted_by_hand_is_the_same_and_the_mode_is_restored(seven: HeldOut, mode: bool) -> None:
    model = Brightest().train(mode)

    assert seven.accuracy(model) == 57.14  # 4 of 7
    assert seven(3, model) == {"accuracy": 57.14}
    assert set(model.modes) == {False}
    assert model.training is mode


def test_images_when_given_to_a_model_are_normalised_and_none_is_left_out(seven: HeldOut) -> None:
    pairs = list(seven.batches(torch.device("cpu")))

    assert [len(labels) for _, labels in pairs] == [3, 3, 1]
    images = torch.cat([images for images, _ in pairs])
    torch.testing.assert_close(images, (seven.data.images / 255 - 0.5) / 0.5)
    assert torch.equal(torch.cat([labels for _, labels in pairs]), seven.data.labels)


def test_members_when_scored_together_have_the_scores_they_have_alone(seven: HeldOut) -> None:
    members = [Brightest(), Brightest(-1.0), Brightest(3.0)]
    ensemble = Ensemble(members, Weighted([1.0, 2.0, 3.0]))

    alone, together = seven.member_accuracies(ensemble)

    assert alone == [seven.accuracy(member) for member in members]
    assert together == seven.accuracy(ensemble)
    assert alone[0] != alone[1]


def test_a_share_is_rounded_to_a_hundredth_of_a_percent() -> None:
    assert percent(1, 3) == 33.33
    assert percent(10_000, 10_000) == 100.0


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
