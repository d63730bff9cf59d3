"""Last layers."""

from __future__ import annotations

import pytest
from torch import nn

from strategies.core.errors import OptionError
from strategies.teacher.heads import features_of, head_keys, last_linear


def test_last_linear_layer_is_found_by_name_and_is_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 5), nn.ReLU()))
    name, layer = last_linear(model)
    assert name == "2.0"
    assert layer is model.get_submodule(name)


@pytest.mark.parametrize(
    ("model", "keys"),
    [(nn.Linear(2, 3), ("weight", "bias")), (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), ("1.weight", "1.bias"))],
    ids=["layer", "model"],
)
def test_head_is_named_as_in_the_state_dict(model: nn.Module, keys: tuple[str, str]) -> None:
    assert head_keys(model, 3) == keys
    assert set(keys) <= model.state_dict().keys()


@pytest.mark.parametrize("other", [nn.Linear(6, 3), nn.Linear(7, 4)])
def test_heads_that_differ_are_refused_by_name(other: nn.Linear) -> None:
    with pytest.raises(OptionError, match=r"a: 7 to 3, b: \d to \d: must take equal numbers"):
        features_of([nn.Linear(7, 3), other], 3, ["a", "b"])
