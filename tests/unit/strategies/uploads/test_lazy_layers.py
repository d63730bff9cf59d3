"""Lazy layers find their sizes by the shape of one example, at every door that takes models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies import FedENS, Iterative, OneShotFedAvg, merge
from strategies.core.errors import OptionError
from strategies.uploads.builders import named_builders


def of_images() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))


def of_rows() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(4))


@pytest.mark.parametrize(
    ("make", "shape", "sizes"),
    [(of_images, (2, 8, 8), [(3, 2, 3, 3), (4, 108)]), (of_rows, (6, 1, 1), [(5, 6), (4, 5)])],
)
def test_lazy_layers_have_the_sizes_of_the_examples(make: Any, shape: Any, sizes: list[tuple[int, ...]]) -> None:
    before = torch.get_rng_state()
    builder = named_builders(make, shape)["model"]
    assert torch.equal(torch.get_rng_state(), before)

    model = builder()

    assert [tuple(value.shape) for name, value in model.named_parameters() if value.dim() > 1] == sizes
    assert all(layer.training for layer in model.modules())
    assert builder.__name__ == make.__name__  # type: ignore[attr-defined]


def test_merge_and_strategies_take_lazy_layers_where_the_shape_is_known(tmp_path: Path) -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(of_images())
        models[-1](torch.rand(4, 1, 8, 8))
    images = torch.rand(3, 1, 8, 8)
    found = merge([one.state_dict() for one in models], "fedens", model=of_images, num_classes=4, input_shape=(1, 8, 8))
    wanted = torch.stack([one.eval()(images) for one in models]).mean(0)
    torch.testing.assert_close(found.ensemble(images), wanted, rtol=1e-4, atol=1e-5)

    task: dict[str, Any] = {"num_classes": 4, "input_shape": (1, 8, 8)}
    for number, kind in enumerate((FedENS, OneShotFedAvg, Iterative)):
        assert kind(of_images, run_dir=tmp_path / str(number), **task)
    with pytest.raises(OptionError, match="lazy layers.*input_shape"):
        OneShotFedAvg(of_images)
