"""Features are extracted once per image: in a process by its memory, on a machine by the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fl_app.data import ImageData
from fl_app.models import feature_heads
from fl_app.models.backbones import Backbone
from fl_app.models.feature_heads import FeatureHead, recalled
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from server_app.settings.server_data import HeldOut
from strategies.method import Normalization

ASKED: list[int] = []
IMAGES = torch.randint(256, (30, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Counting(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ASKED.append(len(images))
        return images.flatten(1)[:, ::7] + 0.1


def make() -> Backbone:
    return Backbone("asked", 28, Counting, side=8)


@pytest.fixture
def function() -> FeatureFunction:
    ASKED.clear()
    feature_heads._memory.cache_clear()
    feature_heads._LAST.clear()
    return FeatureFunction(FeaturesConfig(backbone="test_feature_memory:make"))


def test_known_images_are_not_extracted_again_in_any_order_or_layout(function: FeatureFunction) -> None:
    images = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    first = recalled(function, images)
    torch.testing.assert_close(first, function.module(images))
    ASKED.clear()
    turned = images.flip(0).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(recalled(function, turned), first.flip(0), rtol=0, atol=0)
    assert ASKED == []
    recalled(function, torch.cat([images[:3], images[:2] + 1, images[:2] + 1]))
    assert ASKED == [2]


def test_held_out_features_are_read_from_the_disk_by_the_next_process(
    function: FeatureFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path))
    data, model = ImageData(IMAGES, torch.arange(30) % 3), FeatureHead(function, 3)
    scores = []
    for _ in range(2):
        feature_heads._memory.cache_clear()  # as in a new process
        held = HeldOut(data, Normalization((0.5,), (0.5,)), functions=(function,))
        scores += [held.accuracy(model), held.accuracy(model)]
    assert sum(ASKED) == 1 + len(IMAGES)  # the first is an image of noise, whose features name the file
    assert len(set(scores)) == 1
    feature_heads._memory.cache_clear()
    assert HeldOut(data, Normalization((0.5,), (0.5,))).accuracy(model) == scores[0]  # asks the backbone
    assert sum(ASKED) == 1 + 2 * len(IMAGES)
