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


def test_layer_itself_is_its_own_head() -> None:
    layer = nn.Linear(2, 2)
    assert last_linear(layer) == ("", layer)


def test_model_without_linear_layer_is_refused() -> None:
    with pytest.raises(OptionError, match="Sequential has no linear layer"):
        last_linear(nn.Sequential(nn.Conv2d(1, 1, 3)))


@pytest.mark.parametrize(
    ("model", "keys"),
    [(nn.Linear(2, 3), ("weight", "bias")), (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), ("1.weight", "1.bias"))],
    ids=["layer", "model"],
)
def test_head_is_named_as_in_the_state_dict(model: nn.Module, keys: tuple[str, str]) -> None:
    assert head_keys(model, 3) == keys
    assert set(keys) <= model.state_dict().keys()


def test_head_of_other_outputs_than_classes_is_refused() -> None:
    with pytest.raises(OptionError, match="last linear layer of Linear has 3 outputs: must be 4, one per class"):
        head_keys(nn.Linear(2, 3), 4)


def test_head_whose_weight_is_made_of_others_is_refused() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    with pytest.raises(OptionError, match="computes its weight: must store it"):
        head_keys(model, 3)


def test_heads_of_one_shape_have_one_number_of_features() -> None:
    assert features_of([nn.Linear(7, 3), nn.Linear(7, 3)], 3, ["a", "b"]) == 7


@pytest.mark.parametrize("other", [nn.Linear(6, 3), nn.Linear(7, 4)])
def test_heads_that_differ_are_refused_by_name(other: nn.Linear) -> None:
    with pytest.raises(OptionError, match=r"a: 7 to 3, b: \d to \d: must take equal numbers"):
        features_of([nn.Linear(7, 3), other], 3, ["a", "b"])


def test_heads_with_other_outputs_than_classes_are_refused() -> None:
    with pytest.raises(OptionError, match="and have 10 outputs, one per class"):
        features_of([nn.Linear(7, 3)], 10, ["a"])


def test_heads_of_another_precision_than_generated_features_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="layer of b has weights of float64: must be float32"):
        features_of([nn.Linear(7, 3), nn.Linear(7, 3).double()], 3, ["a", "b"])
