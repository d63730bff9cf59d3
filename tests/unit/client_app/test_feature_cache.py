"""A client's features are extracted once, read from its disk afterwards, and give the same sums to the bit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from client_app.training.features import ClientHead, ClientSums, add_up, train_head
from client_app.training.local import Training
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization
from fl_app.feature_cache import FeatureCache
from fl_app.models.backbones import Backbone
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from strategies.core.seeds import seeded_torch

PASSES: list[int] = []
IMAGES = torch.randint(256, (300, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
HALF = Normalization((0.5,), (0.5,))
DATA = ImageData(IMAGES, torch.arange(300) % 3)


class Counting(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        PASSES.append(len(images) if len(images) > 1 else 0)  # the probe of a function is one image
        return images.flatten(1).repeat(1, 4)[:, :156:4] + 0.1


def make() -> Backbone:
    return Backbone("counting", 39, Counting, side=8)


class Changed(Counting):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).square()


def make_changed() -> Backbone:
    return Backbone("counting", 39, Changed, side=8)


def summed(
    cache: FeatureCache | None, data: ImageData = DATA, make: str = "make", **features: int
) -> dict[str, torch.Tensor]:
    config = FeaturesConfig(backbone=f"test_feature_cache:{make}", **features)
    model = ClientSums(FeatureFunction(config), 3, cache)
    add_up(model, Training(data, ClientConfig(), Normalization((0.5,), (0.5,))))
    return model.state_dict()


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    PASSES.clear()
    return FeatureCache(tmp_path / "state" / "features", 1.0)


def test_a_second_run_reads_the_features_and_has_equal_sums(cache: FeatureCache) -> None:
    without = summed(None)
    PASSES.clear()
    first = summed(cache)
    assert sum(PASSES) == 300
    second = summed(cache)
    assert sum(PASSES) == 300
    for key, value in without.items():
        assert torch.equal(value, first[key])
        assert torch.equal(value, second[key])


def test_other_code_of_the_same_name_and_weights_reads_no_features_of_the_former(cache: FeatureCache) -> None:
    summed(cache)
    assert torch.equal(summed(cache, make="make_changed")["gram"], summed(None, make="make_changed")["gram"])


@pytest.mark.parametrize("place", [0, 7, 200, 20_000, -40, -1])
def test_a_file_with_a_changed_byte_is_extracted_again(cache: FeatureCache, place: int) -> None:
    good = summed(cache)
    (file,) = cache.folder.iterdir()
    data = bytearray(file.read_bytes())
    data[place] ^= 64
    file.write_bytes(data)
    assert torch.equal(summed(cache)["gram"], good["gram"])
    assert sum(PASSES) == 600


def test_files_are_the_user_s_own_and_the_oldest_go_first(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "features", 0.1)
    for number in range(4):
        with cache.writing(f"{number}", (250, 39)) as rows:
            rows.add(torch.full((100, 39), float(number)))
            rows.add(torch.full((150, 39), float(number)))
        os.utime(tmp_path / "features" / f"{number}.npy", (number, number))
    assert sorted(path.name for path in cache.folder.iterdir()) == ["2.npy", "3.npy"]
    assert stat.S_IMODE((cache.folder / "3.npy").stat().st_mode) == 0o600
    found = cache.read("3", (250, 39))
    assert found is not None
    assert bool((found == 3).all())
    with cache.writing("large", (2500, 39)) as none:
        assert none.file is None


def test_a_head_is_trained_on_the_cached_features_of_an_earlier_run(cache: FeatureCache) -> None:
    config, function = ClientConfig(epochs=3), FeatureFunction(FeaturesConfig(backbone="test_feature_cache:make"))
    states = []
    for own in (cache, cache, None):
        with seeded_torch(0, "head"):
            model = ClientHead(function, 3, own)
        last = train_head(model, Training(DATA, config, HALF, "crop-flip"))
        states.append(model.state_dict())
    assert sum(PASSES) == 2 * 300  # the second run reads, the third has no cache
    assert last.number == 3
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])
        assert torch.equal(value, states[2][key])
