from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_app.training import widened as module
from client_app.training.widened import widen
from fl_app.models import build


@pytest.fixture(autouse=True)
def register_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REGISTERS", {torch.backends.cpu.get_cpu_capability(): 8})


def narrow(*between: nn.Module, channels: int = 5, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, channels, 3, bias=bias), *between, nn.Conv2d(channels, 9, 3, stride=2, padding=1), nn.Flatten()
    )


def gradients(model: nn.Module, outputs: Tensor) -> list[Tensor]:
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    return list(torch.autograd.grad(F.cross_entropy(outputs, labels), list(model.parameters())))


@pytest.mark.parametrize("name", ["lenet5", "cnn-torch"])
@pytest.mark.parametrize("channels", [1, 3])
def test_widened_when_a_zoo_model_is_narrow_has_its_outputs_and_gradients(name: str, channels: int) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=10, input_shape=(channels, 32, 32))
    images = torch.randn(6, channels, 32, 32)

    forward = widen(model)

    assert forward is not model
    torch.testing.assert_close(forward(images), model(images))
    own, its = gradients(model, model(images)), gradients(model, forward(images))
    for mine, other in zip(own, its, strict=True):
        torch.testing.assert_close(other, mine)


def test_widened_when_the_weights_change_reads_the_new_ones() -> None:
    model = narrow(nn.ReLU())
    forward, images = widen(model), torch.randn(2, 2, 8, 8)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)

    torch.testing.assert_close(forward(images), copy.deepcopy(model)(images))


def hooked(place: int | None) -> nn.Sequential:
    model = narrow(nn.ReLU())
    layer = model if place is None else model[place]
    layer.register_forward_hook(lambda _, __, output: output + 1.0)
    return model


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(narrow(nn.ReLU(), channels=8), id="wide enough"),
        pytest.param(narrow(nn.BatchNorm2d(5)), id="a layer with weights per channel between"),
        pytest.param(narrow(nn.Softmax(dim=1)), id="a layer that mixes channels between"),
        pytest.param(hooked(0), id="a hook"),
        pytest.param(hooked(1), id="a hook between"),
        pytest.param(hooked(None), id="a hook of the model"),
        pytest.param(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), id="no convolution"),
        pytest.param(build("resnet8", num_classes=3, input_shape=(1, 16, 16)), id="no chain of layers"),
        pytest.param(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)), id="groups"),
    ],
)
def test_widened_when_it_does_not_apply_returns_the_model(model: nn.Module) -> None:
    assert widen(model) is model
