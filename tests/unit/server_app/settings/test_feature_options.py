"""The map, the precision and the least number of examples, from the clients' sums to the result."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from feature_fakes import CLIENTS, SETTINGS

from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.data.split import pixels, unchanged
from fl_app.feature_cache import FeatureSource
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from server_app.settings.read import read_settings
from strategies.core.errors import DataError, OptionError, UploadError


def function(seed: int = 0, **features: Any) -> FeatureFunction:
    return FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make", **features), seed)


def test_features_of_another_projection_are_refused_and_no_projection_reads_other_cached_features() -> None:
    few = function(dim=80)
    with pytest.raises(UploadError, match="differ in dim-seed: 1, expected is 0$"):
        few.sums(10).check_upload(dict(function(1, dim=80).sums(10).state_dict()))
    assert function(3, dim=8).raw == function().raw
    assert function(precision="bfloat16").raw != function().raw
    assert function(3, dim=8).whole == function()


def test_half_precision_is_another_function_whose_features_are_near() -> None:
    images = torch.rand(32, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    whole, half = (function(precision=name).module(images) for name in ("float32", "bfloat16"))
    apart = (whole - half).norm(dim=1)
    assert 1e-5 < float(apart.max()) < 0.1
    assert half.dtype == torch.float64
    with pytest.raises(UploadError, match="differ in precision: bfloat16, expected is float32$"):
        function().sums(10).check_upload(dict(function(precision="bfloat16").sums(10).state_dict()))


@pytest.mark.parametrize(("task", "architecture"), [("statistics", ""), ("classifier", "statistics")])
def test_a_small_client_sends_nothing_and_the_server_is_not_told_its_number(
    task: str, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="flwr")
    app = read_settings({**SETTINGS, "data.partition": "iid", "data.limit": 403, "features.min-examples": 101}).app
    app = replace(app, model=replace(app.model, per_client=architecture))
    sent, silent = [], []
    for partition_id in range(CLIENTS):
        node = Node.of({"partition-id": partition_id, "num-partitions": CLIENTS}, app)
        try:
            sent.append(prepare_upload(app, node, TrainRequest("", 1, 0, task=task), {})[0])
        except UploadError as error:
            silent.append(str(error))
    assert [trained.facts.num_examples for trained in sent] == [101, 101, 101]
    assert silent == ["it has fewer examples than 'features.min-examples', 101, so it sends nothing"]
    assert caplog.text.count("has 100 examples and sends nothing: 'features.min-examples' is 101") == 1


def test_images_that_a_backbone_would_clamp_or_cannot_take_are_refused() -> None:
    labels = torch.arange(4) % 2
    signed = torch.linspace(-1, 1, 4 * 64).reshape(4, 1, 8, 8)
    for images, refused in ((signed, True), ((signed + 1) / 2, False)):
        split = unchanged(labels, images.__getitem__, num_classes=2, shape=(1, 8, 8))
        own = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make"), 0, *split.normalization)
        pooled = FeatureSource(own).pooled(split.take(), split.normalization)
        for act in (partial(own.check, split, "mine"), partial(next, pooled)):
            with pytest.raises(DataError, match=r"outside \[0, 1\]: must be pixels") if refused else nullcontext():
                act()
    grey_alpha = pixels(labels, signed.__getitem__, num_classes=2, shape=(2, 8))
    with pytest.raises(OptionError, match="'mine', whose images have 2 channels: must be 1 or 3 for"):
        function().check(grey_alpha, "mine")
