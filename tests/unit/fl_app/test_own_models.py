"""A user's own architectures: found, built, tried out, and refused in one line."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fl_app.models import build, builders
from fl_app.models.backbones import backbone_of
from strategies.core.errors import OptionError
from strategies.core.vision import torchvision

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))

    def forward(self, x):
        return self.layers(x)


class Nets:
    net = Net


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 10))


def any_words(**given):
    return Net(**given)


def pair():
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()


halves = lambda num_classes, input_shape: Net(num_classes, input_shape).half()
narrow = lambda num_classes: nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes - 1))
needs = lambda width: plain()
no_net = lambda: 7


def broken():
    raise ValueError("no\\nsuch layer")


number = 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the user's modules, which is the working directory."""
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "needs_absent.py").write_text("import absent_package_of_own\n")
    (tmp_path / "misspelt.py").write_text("x = = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_models", "needs_absent", "misspelt"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["own_models:Net", "own_models:Nets.net", "own_models:plain", "own_models:any_words"])
@pytest.mark.usefixtures("project")
def test_an_own_architecture_maps_examples_to_logits(name: str) -> None:
    model = build(name, num_classes=10, input_shape=(1, 4, 4))

    assert model(torch.zeros(3, 1, 4, 4)).shape == (3, 10)
    found = builders(10, (1, 4, 4), [name])
    assert found[name]().training
    assert pickle.dumps(found[name])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_models:narrow", r"maps 2 examples of shape \(1, 4, 4\) to float32 \[2, 9\]: must be float32 \[2, 10\]"),
        ("own_models:pair", "maps examples to tuple: must map them to one tensor of logits"),
        ("own_models:halves", "does not take examples of shape (.*): RuntimeError"),
        ("own_models:needs", "needs the argument 'width': must need none but num_classes, input_shape"),
        ("own_models:no_net", "returns int: must return an nn.Module"),
        ("own_models:broken", "fails: ValueError: no such layer"),
        ("own_models:number", "is 'own_models:number', which is int: must be a function or a class"),
        ("own_models:Nett", "module 'own_models' has no 'Nett'; did you mean 'Net'?"),
        ("absent_models:Net", "there is no module 'absent_models' in .*, nor elsewhere on Python's path"),
        ("needs_absent:Net", "module 'needs_absent' imports 'absent_package_of_own', which is not installed"),
        ("misspelt:Net", "module 'misspelt' cannot be imported: SyntaxError"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_wrong_own_architecture_is_refused_in_one_line_that_names_it(name: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason) as error:
        builders(10, (1, 4, 4), [name])

    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_models:no_net", "returns int: must return a oneshot_fl.fl_app.models.backbones.Backbone"),
        ("own_models:broken", "which fails: ValueError"),
        ("resnet", "must be 'efficientnet-lite0', .*, or 'module:attribute'"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_wrong_own_backbone_is_refused_in_the_same_way(name: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        backbone_of(name)


def test_a_backbone_s_file_has_the_usual_names_too(tmp_path: Path) -> None:
    own = torchvision.models.shufflenet_v2_x0_5(weights=None).state_dict()
    wrapped = {f"net.module.{key}": value for key, value in own.items() if not key.endswith("num_batches_tracked")}
    file = tmp_path / "weights.pt"

    def features(state: dict[str, torch.Tensor]) -> torch.Tensor:
        torch.save(state, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        net = backbone_of("torchvision:shufflenet_v2_x0_5", str(file), digest).build()
        with torch.no_grad():
            return torch.as_tensor(net(torch.ones(1, 3, 64, 64)))

    assert torch.equal(features({**wrapped, "n_averaged": torch.tensor(9)}), features(own))
    with pytest.raises(OptionError, match=r"'features.weights' is .*not expected net\.module\.other\.weight"):
        features({**wrapped, "net.module.other.weight": torch.ones(2)})
