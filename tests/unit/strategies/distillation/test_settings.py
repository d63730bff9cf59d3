from dataclasses import dataclass

import pytest
import torch

from strategies.core.errors import OptionError
from strategies.core.options import check
from strategies.distillation.settings import DistillOptions, PoolOptions, SynthesisOptions, check_pool, preset
from strategies.distillation.synthesis import Recipe


def test_recipe_takes_over_every_option_of_the_loop() -> None:
    options = SynthesisOptions(
        generator_steps=3, generator_lr=0.5, generator_clip=2.0, generator_precision="bfloat16", optimize_noise=False,
        keep_images="last",
    )  # fmt: skip
    expected = Recipe(steps=3, lr=0.5, clip=2.0, optimize_noise=False, keep="last", precision="bfloat16")
    assert options.recipe() == expected
    assert SynthesisOptions().recipe() == Recipe(clip=10.0)


def test_pool_stores_bytes_or_the_pixels_as_made() -> None:
    images, labels = torch.tensor([0.0, 0.5, 0.999]).view(3, 1, 1, 1), torch.arange(3)
    rows = PoolOptions().stored(images, labels)
    assert rows["images"].dtype == torch.uint8
    assert rows["images"].flatten().tolist() == [0, 127, 254]
    assert torch.equal(rows["labels"], labels)
    assert torch.equal(PoolOptions(pool_precision="float32").stored(images, labels)["images"], images)


@pytest.mark.parametrize("cap", [0, 2])
def test_pool_of_one_image_is_refused(cap: int) -> None:
    check_pool(PoolOptions(pool_cap=cap), "toy")
    with pytest.raises(OptionError, match=r"'toy.pool-cap' is 1: must be 0 or a whole number at least 2"):
        check_pool(PoolOptions(pool_cap=1), "toy")


@dataclass(frozen=True)
class ToyConfig(DistillOptions):
    def __post_init__(self) -> None:
        check(self, "toy")


PRESETS = {"default": {}, "paper": {"epochs": 7, "optimizer": "adam"}}


def test_preset_is_its_values_then_the_changes() -> None:
    assert preset(ToyConfig, PRESETS, "paper", epochs=8) == ToyConfig(epochs=8, optimizer="adam")
    assert preset(ToyConfig, PRESETS, "default") == ToyConfig()


def test_preset_that_is_unknown_or_changed_out_of_range_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown preset 'code' of ToyConfig: known are default, paper"):
        preset(ToyConfig, PRESETS, "code")
    with pytest.raises(OptionError, match="toy.epochs"):
        preset(ToyConfig, PRESETS, "paper", epochs=0)
