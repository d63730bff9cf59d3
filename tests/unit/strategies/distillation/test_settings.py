from dataclasses import dataclass
from typing import Any

import pytest
from method_fakes import tiny_job

from strategies.core.errors import OptionError
from strategies.core.options import check, presets
from strategies.distillation.distill import DistillRecipe
from strategies.distillation.learner import Learner
from strategies.distillation.settings import (
    StudentOptions,
)
from strategies.method import METHODS, Job, Silent


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("tally", {"optimizer": "adam", "schedule": "one-cycle"}),
        ("fedkd", {"optimizer": "adam"}),
        ("fed-et", {"optimizer": "adam"}),
        ("feddf", {"weight_decay": 1e-4, "schedule": "cosine", "student_clip": 10.0}),
    ],
)
def test_a_method_trains_its_student_by_its_options_and_what_its_publication_fixes(
    name: str, fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        pass

    def built(_: Learner, __: Job, ___: Any, recipe: DistillRecipe, *, asked_once: bool = False, **____: Any) -> None:
        found.append((recipe, asked_once))
        raise StopError

    found: list[tuple[DistillRecipe, bool]] = []
    monkeypatch.setattr(Learner, "__init__", built)
    given: dict[str, Any] = {"epochs": 7, "batch_size": 8, "kd_temperature": 2.0, "student_lr": 0.5}
    few = {"probes": 8} if name == "tally" else {}
    with pytest.raises(StopError):
        METHODS[name].fit(tiny_job(METHODS[name].config(**given, **few)), Silent())
    assert found == [(DistillRecipe(**given, **fixed), name in ("fedkd", "fed-et"))]


PRESETS = {"default": {}, "paper": {"epochs": 7, "schedule": "constant"}}


@dataclass(frozen=True)
class ToyConfig(StudentOptions):
    preset = presets(PRESETS)

    def __post_init__(self) -> None:
        check(self, "toy")


def test_preset_is_its_values_then_the_changes() -> None:
    assert ToyConfig.preset("paper", epochs=8) == ToyConfig(epochs=8, schedule="constant")
    assert ToyConfig.preset("default") == ToyConfig()


def test_preset_that_is_unknown_or_changed_out_of_range_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown preset 'code' of ToyConfig: known are default, paper"):
        ToyConfig.preset("code")
    with pytest.raises(OptionError, match="toy.epochs"):
        ToyConfig.preset("paper", epochs=0)
