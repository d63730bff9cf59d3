"""What ``merge`` is given, and what it refuses in one line."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies import merge
from strategies.core.errors import OneShotError, OptionError

SHAPE: dict[str, Any] = {"num_classes": 4, "input_shape": (1, 8, 8), "threads": 1, "log": str}
IMAGES = torch.linspace(-1, 1, 6 * 64).view(6, 1, 8, 8)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4))


class Telling(Net):
    def get_extra_state(self) -> Any:
        return {"version": 1}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (Net(), "models is Net: must be a list of models, or a mapping"),
        (Net, "models is the class Net: must be a list of models"),
        (None, "models is NoneType: must be a list of models"),
        ("net.pt", "models is str: must be a list of models"),
        (Path("net.pt"), "models is PosixPath: must be a list of models"),
        ([Net(), None], "model 'client-001' is NoneType: must be a module, a state dict or a checkpoint file"),
        ([Net], "model 'client-000' is the class Net: must be a module"),
        (Net().state_dict(), "model '1.weight' is Tensor: must be a module"),
        ({1: Net()}, "client name is 1: must be up to 64 letters"),
        ([Net().to("meta")], "model 'client-000': tensor '1.weight' has no values yet"),
        ([nn.Sequential(nn.Flatten(), nn.LazyLinear(4))], "model 'client-000': tensor '1.weight' has no values yet"),
        ([Telling()], "model 'client-000': '_extra_state' of its state dict is dict: must be a tensor"),
        ([{"state_dict": Net().state_dict()}], "model 'client-000': 'state_dict' of its state dict is OrderedDict"),
        ([{1: torch.ones(1)}], "model 'client-000': 1 of its state dict is Tensor: must be a tensor with a name"),
    ],
)
@pytest.mark.parametrize("model", [None, Net])
def test_models_of_another_form_are_named_in_one_line(models: Any, said: str, model: Any) -> None:
    if model is None and isinstance(models, list) and isinstance(models[0], dict):
        model = Net  # which weights alone need
    with pytest.raises(OneShotError, match=re.escape(said)):
        merge(models, "fedens", model=model, **SHAPE)


@pytest.mark.parametrize("sizes", [[True], np.array([True]), torch.tensor([True]), np.array([2.5])])
def test_sizes_and_counts_that_are_no_whole_numbers_are_refused(sizes: Any) -> None:
    with pytest.raises(OneShotError, match=r"num-examples is (True|2\.5): must be a positive whole number"):
        merge([Net()], "fedens", num_examples=sizes, **SHAPE)
    with pytest.raises(OneShotError, match="label-counts is .*: must be 4 whole numbers from 0"):
        merge([Net()], "fedens", label_counts=[[0.5, 1.5, 1.0, 0.0]], **SHAPE)  # type: ignore[list-item]


def test_an_ensemble_of_two_architectures_needs_no_student() -> None:
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 4))

    for models in ({"a": Net(), "b": wide}, {"b": Net(), "a": wide}):
        results = [merge(models, "fedens", **SHAPE), merge(models, "fedens", student="Net", **SHAPE)]
        found = [result.ensemble(IMAGES) for result in results if result.ensemble is not None]
        assert torch.equal(*found)
    built = merge([Net(), wide], "fedens", model={"wide": lambda: copy.deepcopy(wide), "net": Net}, **SHAPE)
    assert [upload.architecture for upload in built.job.uploads] == ["net", "wide"]
    with pytest.raises(OptionError, match="student is 'Nets': must be one of Net, Sequential"):
        merge({"a": Net(), "b": wide}, "fedens", student="Nets", **SHAPE)
