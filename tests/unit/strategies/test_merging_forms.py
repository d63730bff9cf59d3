"""merge() with models of every output, and a result beside another model."""

from __future__ import annotations

from collections.abc import Callable
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
    """Returns what ``answer`` makes of itself, its logits and the images."""

    def __init__(
        self, answer: Callable[[Any, torch.Tensor, torch.Tensor], Any] | None = None, outputs: int = 2
    ) -> None:
        super().__init__()
        self.head, self.answer = nn.Sequential(nn.Flatten(), nn.Linear(16, outputs)), answer
        self.register_buffer("cache", torch.zeros(16), persistent=False)

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.head(images)
        return logits if self.answer is None else self.answer(self, logits, images)


def caching(net: Any, logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    net.cache = torch.arange(16.0).cos()
    return logits


FORMS: dict[str, Callable[[], Net]] = {
    "logits": Net,
    "pair": lambda: Net(lambda net, z, x: (z, x.mean())),
    "named": lambda: Net(lambda net, z, x: SimpleNamespace(logits=z)),
    "softmax": lambda: Net(lambda net, z, x: z.softmax(1)),
    "sigmoid": lambda: Net(lambda net, z, x: z.sigmoid(), outputs=1),
    "more in training": lambda: Net(lambda net, z, x: (z, z) if net.training else z),
    "cache": lambda: Net(caching),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [False, True])
def test_a_saved_ensemble_of_any_outputs_answers_as_the_one_in_memory(form: str, model: bool, tmp_path: Path) -> None:
    make = FORMS[form]
    further = {"model": make} if model else {}

    result = merge([make(), make()], "fedens", num_classes=2, **further, **QUIET)
    result.save(tmp_path)

    name = result.job.uploads[0].architecture
    loaded = load_ensemble_module(tmp_path / "ensemble", {name: make})
    assert torch.equal(loaded(IMAGES), result.ensemble(IMAGES))
    assert loaded(IMAGES).shape == (6, 2)


@pytest.mark.parametrize("form", ["named", "softmax", "more in training"])
def test_a_student_may_return_more_than_logits(form: str) -> None:
    models, config = [FORMS[form]() for _ in range(2)], TallyConfig(epochs=1, images=16)

    result = merge(models, "tally", num_classes=2, config=config, **QUIET)

    assert result.student(IMAGES).shape == (6, 2)


@pytest.fixture(scope="module")
def merged() -> Result:
    return merge([Net(), Net()], "fedens", num_classes=2, **QUIET)


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
    for form in ("pair", "named"):  # whose output holds the same logits
        told = FORMS[form]()
        told.load_state_dict(other.state_dict())
        assert merged.evaluate(data, against=told)["ensemble"]["gain"] == found["gain"]
    same = merged.evaluate(data, against=merged.ensemble)["ensemble"]["gain"]
    assert [score["value"] for score in same.values()] == [0.0] * 5


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (Net(outputs=3), r"against returns \[6, 3\]: must be logits \[6, 2\], as the ensemble"),
        (nn.Flatten(0), r"against returns \[[0-9]+\]: must be logits \[6, 2\], as the ensemble"),
        (FORMS["softmax"](), "against returns probabilities, which sum to 1: must be logits"),
        (nn.ModuleList([]), "the other model does not take a batch"),
        (
            Net(lambda net, z, x: {"loss": x.mean(), "scores": z}),
            "the other model returns a dict of loss, scores: must return logits",
        ),
        ("merged", "against is Result: must be a module"),
    ],
)
def test_what_no_result_can_be_compared_with_is_refused(merged: Result, other: Any, line: str) -> None:
    with pytest.raises(OptionError, match=line):
        merged.evaluate([(IMAGES, LABELS)], against=merged if other == "merged" else other)
