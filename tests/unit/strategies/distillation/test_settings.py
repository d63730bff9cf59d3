from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from method_fakes import tiny_job

from strategies.core.errors import OptionError
from strategies.core.options import check, presets
from strategies.distillation.distill import DistillRecipe
from strategies.distillation.learner import Learner
from strategies.distillation.settings import (
    DistillOptions,
    PoolOptions,
    StudentOptions,
    SynthesisOptions,
    TextOrCodeOptions,
    check_pool,
)
from strategies.distillation.synthesis import Recipe
from strategies.method import METHODS, Job, Silent


def test_recipe_takes_over_every_option_of_the_loop() -> None:
    given: dict[str, Any] = {
        "generator_steps": 3, "generator_lr": 0.5, "generator_clip": 2.0, "generator_precision": "bfloat16",
    }  # fmt: skip
    expected = Recipe(steps=3, lr=0.5, clip=2.0, precision="bfloat16")
    assert SynthesisOptions(**given).recipe() == expected
    assert SynthesisOptions().recipe() == TextOrCodeOptions().recipe() == Recipe(clip=10.0, precision="auto")
    text = TextOrCodeOptions(**given, optimize_noise=False, keep_images="last").recipe()
    assert text == replace(expected, optimize_noise=False, keep="last")


def test_pool_stores_bytes_or_the_pixels_as_made() -> None:
    images, labels = torch.tensor([0.0, 0.5, 0.999]).view(3, 1, 1, 1), torch.arange(3)
    for options in (PoolOptions(), TextOrCodeOptions()):
        rows = options.stored(images, labels)
        assert rows["images"].dtype == torch.uint8
        assert rows["images"].flatten().tolist() == [0, 127, 254]
        assert torch.equal(rows["labels"], labels)
    assert torch.equal(TextOrCodeOptions(pool_precision="float32").stored(images, labels)["images"], images)


def test_recipe_of_a_student_has_its_options_and_constants() -> None:
    few = DistillOptions(epochs=7, batch_size=8, kd_temperature=2.0, student_lr=0.5)
    assert few.distill_recipe() == DistillRecipe(7, 8, 2.0, 0.5)
    assert few.distill_recipe(optimizer="adam") == DistillRecipe(7, 8, 2.0, 0.5, optimizer="adam")
    given: dict[str, Any] = {"steps_per_epoch": 3, "weight_decay": 0.1, "schedule": "one-cycle", "student_clip": 1.0}
    more = StudentOptions(epochs=7, batch_size=8, kd_temperature=2.0, student_lr=0.5, **given)
    assert more.distill_recipe() == DistillRecipe(7, 8, 2.0, 0.5, **given)


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


@pytest.mark.parametrize("cap", [0, 2])
def test_pool_of_one_image_is_refused(cap: int) -> None:
    check_pool(PoolOptions(pool_cap=cap), "toy")
    with pytest.raises(OptionError, match=r"'toy.pool-cap' is 1: must be 0 or a whole number at least 2"):
        check_pool(PoolOptions(pool_cap=1), "toy")


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
