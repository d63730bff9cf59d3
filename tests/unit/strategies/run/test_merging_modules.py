"""Modules that are merged without a builder: which of them are of one architecture."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from strategies import merge
from strategies.core.errors import OneShotError, OptionError, StoreError
from strategies.merging.copies import copies_of

SHAPE: dict[str, Any] = {"num_classes": 4, "input_shape": (1, 8, 8), "threads": 1, "log": str}
IMAGES = torch.linspace(-1, 1, 6 * 64).view(6, 1, 8, 8)


class Holder(nn.Module):
    """Holds a value that no layer shows, as an activation or a scale."""

    def __init__(self, held: Any = torch.relu) -> None:
        super().__init__()
        self.body = nn.Linear(64, 5)
        self.head = nn.Linear(5, 4)
        self.held = held

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.held(self.body(images.flatten(1))))  # type: ignore[no-any-return]


class Shifted(nn.Module):
    def __init__(self, mean: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.tensor(mean), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head((images - self.mean).flatten(1))  # type: ignore[no-any-return]


def layers(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(rate), nn.Linear(64, 4))


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values * factor


class Options:
    def __init__(self, width: int) -> None:
        self.width = width


def around(build: Callable[[], nn.Module]) -> nn.Module:
    """A module whose attributes refer to its own layers and to itself."""
    module: Any = Holder()
    module.inner = build()
    module.held = module.inner.forward
    module.known = {"layers": [module.inner], "parameters": list(module.parameters()), "self": module}
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "models",
    [
        [Holder(torch.relu), Holder(torch.sin)],
        [Holder(scaled(1.0)), Holder(scaled(5.0))],
        [Holder(partial(torch.clamp, min=0)), Holder(partial(torch.clamp, min=-1))],
        [Shifted(0.0), Shifted(3.0)],
        [layers(0.1), layers(0.5)],
    ],
)
def test_an_ensemble_keeps_what_sets_its_members_apart_in_any_order(models: list[nn.Module]) -> None:
    with torch.no_grad():
        expected = sum(model.eval()(IMAGES) for model in models) / 2
        for given in (models, models[::-1], {"b": models[0], "a": models[1]}):
            ensemble = merge(given, "fedens", **SHAPE).ensemble
            torch.testing.assert_close(ensemble(IMAGES), expected)


def test_a_buffer_that_no_state_dict_has_is_not_lost_in_a_saved_ensemble(tmp_path: Path) -> None:
    result = merge([Shifted(0.0), Shifted(3.0)], "fedens", **SHAPE)
    with pytest.raises(StoreError, match="the models differ in buffer 'mean', which is not in their state_dict"):
        result.save(tmp_path)
    merge([Shifted(3.0), Shifted(3.0)], "fedens", **SHAPE).save(tmp_path / "equal")


def test_a_buffer_that_a_builder_draws_anew_is_refused() -> None:
    def drawn() -> nn.Module:
        return Shifted(float(torch.rand(())))

    with pytest.raises(OptionError, match="mean.*persistent=True"):
        merge([drawn(), drawn()], "fedens", model=drawn, **SHAPE)


@pytest.mark.parametrize(
    "build",
    [
        layers,
        Shifted,
        lambda: Holder(scaled(2.0)),
        lambda: Holder(partial(torch.clamp, min=0)),
        lambda: Holder({"a": torch.ones(2), "b": Options(3), "c": {1, 2}, "d": None}),
        lambda: nn.LSTM(3, 4),
        lambda: nn.TransformerEncoderLayer(4, 2),
        lambda: Holder(nn.LSTM(3, 4)),
        lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: Holder(parametrizations.spectral_norm(nn.Linear(3, 4))),
        lambda: around(lambda: nn.LSTM(3, 4)),
    ],
)
def test_modules_that_differ_in_their_weights_alone_are_of_one_architecture(build: Callable[[], nn.Module]) -> None:
    trained = [build() for _ in range(2)]
    trained[1].eval().requires_grad_(False)

    copies = copies_of(dict(zip("ab", trained, strict=True)), "classifier")

    assert set(copies.architectures.values()) == {type(trained[0]).__name__}
    assert not copies.difference


DIFFER = "method 'fedavg' needs one architecture, but models 'a' and 'b' differ in 'held': .* model="


@pytest.mark.parametrize(
    ("method", "asked", "said"),
    [
        ("fedavg", {}, DIFFER),
        ("fedavg", {"student": "Holder"}, DIFFER),
        ("tally", {}, "student is None: must be one of Holder, Holder-2, because .* differ in 'held'; or give model="),
    ],
)
def test_a_method_that_needs_one_architecture_says_what_differs(method: str, asked: dict[str, Any], said: str) -> None:
    models = {"a": Holder(torch.relu), "b": Holder(torch.sin)}

    with pytest.raises(OptionError, match=said):
        merge(models, method, **asked, **SHAPE)

    assert merge(models, "fedavg", model=Holder, **SHAPE).student is not None


# What ``merge`` is given, and what it refuses in one line.


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4))


class Telling(Net):
    def get_extra_state(self) -> Any:
        return {"version": 1}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (Net(), "models is Net: must be a list of models"),
        (Net, "models is the class Net: must be a list of models"),
        (None, "models is NoneType: must be a list of models"),
        ("net.pt", "models is 'net.pt', which does not exist"),
        (Path("net.pt"), "models is 'net.pt', which does not exist"),
        ([Net(), None], "model 'client-001' is NoneType: must be a module, a state dict or a checkpoint file"),
        ([Net], "model 'client-000' is the class Net: must be a module"),
        (Net().state_dict(), "model '1.weight' is Tensor: must be a module"),
        ({1: Net()}, "client name is 1: must be up to 64 letters"),
        ([Net().to("meta")], "model 'client-000': tensor '1.weight' is without values yet"),
        (
            [nn.Sequential(nn.Flatten(), nn.LazyLinear(4))],
            "model 'client-000': tensor '1.weight' is without values yet",
        ),
        ([Telling()], "model 'client-000': '_extra_state' of its state dict is dict: must be a dense tensor"),
        ([{"optimizer": Net().state_dict()}], "model 'client-000': 'optimizer' of its state dict is OrderedDict"),
        ([{1: torch.ones(1)}], "model 'client-000': 1 of its state dict is Tensor: must be a dense tensor with a name"),
    ],
)
@pytest.mark.parametrize("model", [None, Net])
def test_models_of_another_form_are_named_in_one_line(models: Any, said: str, model: Any) -> None:
    if model is None and isinstance(models, list) and isinstance(models[0], dict):
        model = Net  # which weights alone need
    with pytest.raises(OneShotError, match=re.escape(said)):
        merge(models, "fedens", model=model, **SHAPE)


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
