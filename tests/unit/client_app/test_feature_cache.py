"""Features are extracted once per image: on a client's disk, in a process by its memory, on a machine by the cache."""

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
from fl_app.models import feature_heads
from fl_app.models.backbones import Backbone
from fl_app.models.feature_heads import FeatureHead, recalled
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from server_app.settings.server_data import HeldOut
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


def summed(cache: FeatureCache | None, make: str = "make") -> dict[str, torch.Tensor]:
    model = ClientSums(FeatureFunction(FeaturesConfig(backbone=f"test_feature_cache:{make}")), 3, cache)
    add_up(model, Training(DATA, ClientConfig(), HALF))
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


# In a process by its memory, and for held-out examples.


@pytest.fixture
def function() -> FeatureFunction:
    PASSES.clear()
    feature_heads._memory.cache_clear()
    feature_heads._LAST.clear()
    return FeatureFunction(FeaturesConfig(backbone="test_feature_cache:make"))


def test_known_images_are_not_extracted_again_in_any_order_or_layout(function: FeatureFunction) -> None:
    images = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    first = recalled(function, images)
    torch.testing.assert_close(first, function.module(images))
    PASSES.clear()
    turned = images.flip(0).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(recalled(function, turned), first.flip(0), rtol=0, atol=0)
    assert PASSES == []
    recalled(function, torch.cat([images[:3], images[:2] + 1, images[:2] + 1]))
    assert PASSES == [2]


def test_held_out_features_are_read_from_the_disk_by_the_next_process(
    function: FeatureFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path))
    model = FeatureHead(function, 3)
    scores = []
    for _ in range(2):
        feature_heads._memory.cache_clear()  # as in a new process
        held = HeldOut(DATA, HALF, functions=(function,))
        scores += [held.accuracy(model), held.accuracy(model)]
    assert sum(PASSES) == len(IMAGES)
    assert len(set(scores)) == 1
    feature_heads._memory.cache_clear()
    assert HeldOut(DATA, HALF).accuracy(model) == scores[0]  # asks the backbone
    assert sum(PASSES) == 2 * len(IMAGES)
