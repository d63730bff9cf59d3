"""merge() with models of every output, buffers outside of the state_dict, and arguments of wrong types."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from strategies import merge
from strategies.core.errors import OptionError
from strategies.merging.merge import Result
from strategies.methods.tally import TallyConfig
from strategies.run.ensembles import load_ensemble_module

SHAPE = (1, 4, 4)
IMAGES = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 0, 1, 1, 0])
QUIET: dict[str, Any] = {"input_shape": SHAPE, "log": lambda _: None}


class Net(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))

    def forward(self, images: torch.Tensor) -> Any:
        return self.head(images)


class Pair(Net):
    def forward(self, images: torch.Tensor) -> Any:
        return self.head(images), images.mean()


class Losses(Net):
    def forward(self, images: torch.Tensor) -> Any:
        return {"loss": images.mean(), "scores": self.head(images)}


class Named(Net):
    def forward(self, images: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(images))


class Softmax(Net):
    def forward(self, images: torch.Tensor) -> Any:
        return self.head(images).softmax(1)


class Sigmoid(Net):
    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, images: torch.Tensor) -> Any:
        return self.head(images).sigmoid()


class MoreInTraining(Net):
    def forward(self, images: torch.Tensor) -> Any:
        return (self.head(images), self.head(images)) if self.training else self.head(images)


class RandomProjection(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(16), persistent=False)


class Cache(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(16), persistent=False)

    def forward(self, images: torch.Tensor) -> Any:
        self.cache = torch.arange(16.0).cos()
        return self.head(images)


@pytest.mark.parametrize("kind", [Net, Pair, Named, Softmax, Sigmoid, MoreInTraining, Cache])
@pytest.mark.parametrize("model", [False, True])
def test_a_saved_ensemble_of_any_outputs_answers_as_the_one_in_memory(
    kind: type[nn.Module], model: bool, tmp_path: Path
) -> None:
    further = {"model": kind} if model else {}

    result = merge([kind(), kind()], "fedens", num_classes=2, **further, **QUIET)
    result.save(tmp_path)

    name = result.job.uploads[0].architecture
    loaded = load_ensemble_module(tmp_path / "ensemble", {name: kind})
    assert torch.equal(loaded(IMAGES), result.ensemble(IMAGES))
    assert loaded(IMAGES).shape == (6, 2)


@pytest.mark.parametrize("kind", [Named, Softmax, MoreInTraining])
def test_a_student_may_return_more_than_logits(kind: type[nn.Module]) -> None:
    config = TallyConfig(epochs=1, images=16)

    result = merge([kind(), kind()], "tally", num_classes=2, config=config, **QUIET)

    assert result.student(IMAGES).shape == (6, 2)


def test_a_buffer_that_no_upload_would_have_is_refused() -> None:
    with pytest.raises(OptionError, match="projection.*persistent=True"):
        merge([RandomProjection(), RandomProjection()], "fedens", num_classes=2, model=RandomProjection, **QUIET)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_classes", "2"), ("input_shape", (1, 4)), ("normalization", 0.5), ("normalization", (0.5, 0.5)),
        ("label_counts", 5), ("label_counts", [5, 5]), ("label_counts", [[1, "x"], [1, 2]]), ("num_examples", 7),
        ("log", True), ("proxy", [1]), ("labelled", IMAGES), ("seed", "a"), ("threads", "2"), ("model", Net()),
        ("method", Net), ("models", None),
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_refused_by_its_name(name: str, value: object) -> None:
    given: dict[str, Any] = {"models": [Net(), Net()], "method": "fedens", "num_classes": 2, **QUIET, name: value}

    with pytest.raises(OptionError, match=name):
        merge(**given)


@pytest.fixture(scope="module")
def merged() -> Result:
    return merge([Net(), Net()], "fedens", num_classes=2, **QUIET)


def test_one_hot_labels_score_as_their_numbers(merged: Result) -> None:
    scores = merged.evaluate([(IMAGES, LABELS)])

    for labels in (nn.functional.one_hot(LABELS, 2), nn.functional.one_hot(LABELS, 2).numpy(), LABELS[:, None]):
        assert merged.evaluate([(IMAGES, labels)]) == scores


@pytest.mark.parametrize(
    "loader",
    [None, 3, [(IMAGES, torch.rand(6, 2))], [(IMAGES * torch.nan, LABELS)], [(IMAGES, LABELS + 1)],
     [(IMAGES, LABELS - 1)]],
    ids=["none", "number", "probabilities", "nan", "from one", "below zero"],
)  # fmt: skip
def test_examples_and_labels_that_would_score_wrongly_are_refused(merged: Result, loader: Any) -> None:
    with pytest.raises(OptionError):
        merged.evaluate(loader)


def test_a_result_is_compared_with_another_model_by_example(merged: Result) -> None:
    other, data = Net().train(), [(IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:])]

    found = merged.evaluate(data, against=other)["ensemble"]

    assert other.training
    assert {key: value for key, value in found.items() if key != "gain"} == merged.evaluate(data)["ensemble"]
    alone = merge([other], "fedens", num_classes=2, **QUIET).evaluate(data)["ensemble"]["scores"]
    for name, score in found["gain"].items():
        sign = -1 if name == "log-loss" else 1
        apart = sign * (found["scores"][name]["value"] - alone[name]["value"])
        assert score["low"] <= score["value"] <= score["high"]
        assert score["value"] == pytest.approx(apart, abs=2e-6), name
    for kind in (Pair, Named):  # whose output holds the same logits
        told = kind()
        told.load_state_dict(other.state_dict())
        assert merged.evaluate(data, against=told)["ensemble"]["gain"] == found["gain"]
    same = merged.evaluate(data, against=merged.ensemble)["ensemble"]["gain"]
    assert [score["value"] for score in same.values()] == [0.0] * 5


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (Net(3), r"against returns \[6, 3\]: must be logits \[6, 2\], as the ensemble"),
        (nn.Flatten(0), r"against returns \[[0-9]+\]: must be logits \[6, 2\], as the ensemble"),
        (Softmax(), "against returns probabilities, which sum to 1: must be logits"),
        (nn.ModuleList([]), "the other model does not take a batch"),
        (Losses(), "the other model returns a dict of loss, scores: must return logits"),
        ("merged", "against is Result: must be a module"),
    ],
)
def test_what_no_result_can_be_compared_with_is_refused(merged: Result, other: Any, line: str) -> None:
    with pytest.raises(OptionError, match=line):
        merged.evaluate([(IMAGES, LABELS)], against=merged if other == "merged" else other)
