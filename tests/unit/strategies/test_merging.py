"""``merge``: trained models in, one result out, whatever form the models have."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from strategies import Result, load_ensemble_module, merge
from strategies.core.errors import OptionError, UploadError
from strategies.methods.fedavg import FedAvgConfig
from strategies.methods.tally import TallyConfig

SHAPE: dict[str, Any] = {"num_classes": 4, "input_shape": (1, 8, 8), "threads": 1, "log": str}
COUNTS = [[5, 5, 5, 0], [0, 6, 5, 9], [0, 7, 5, 18]]
SMALL = TallyConfig(epochs=1, batch_size=6, images=12, probes=6)
IMAGES = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)


class Net(nn.Module):
    def __init__(self, width: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(36 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(images)).relu().flatten(1))  # type: ignore[no-any-return]


def trained(seed: int, build: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return build()


NETS = [trained(seed) for seed in range(3)]


def predicted(result: Result) -> torch.Tensor:
    model = result.student if result.student is not None else result.ensemble
    with torch.no_grad():
        return model(IMAGES)  # type: ignore[no-any-return]


def test_ten_lines_end_with_a_student_and_an_ensemble_and_leave_the_models_alone(tmp_path: Path) -> None:
    before = copy.deepcopy([net.state_dict() for net in NETS])

    result = merge(NETS, label_counts=COUNTS, config=SMALL, **SHAPE)
    scores = result.evaluate([(IMAGES, torch.tensor([0, 1, 2]))])
    result.save(tmp_path / "merged")

    assert result.clients == ("client-000", "client-001", "client-002")
    assert scores.keys() == {"student", "ensemble"}
    for found in scores.values():
        accuracy = found["scores"]["accuracy"]
        assert found["accuracy"] in (0.0, 33.33, 66.67, 100.0)
        assert accuracy["low"] <= accuracy["value"] == pytest.approx(found["accuracy"] / 100, abs=1e-4)
    stored = load_file(tmp_path / "merged/student.safetensors")
    assert all(torch.equal(value, stored[key]) for key, value in result.student.state_dict().items())
    loaded = load_ensemble_module(tmp_path / "merged", {"Net": Net})
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), result.ensemble(IMAGES))
    for net, state in zip(NETS, before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_sizes_of_training_sets_and_configs_reach_the_method() -> None:
    by_name = {f"client-{number:03d}": COUNTS[number] for number in (2, 0, 1)}
    plain, weighted, counted, named = (
        predicted(merge(NETS, "fedavg", **SHAPE, **more))
        for more in (
            {"config": FedAvgConfig()},
            {"num_examples": [15, 20, 30]},
            {"label_counts": COUNTS},
            {"label_counts": by_name},
        )
    )

    assert torch.equal(weighted, counted)
    assert torch.equal(weighted, named)
    assert not torch.equal(plain, weighted)


def test_two_architectures_need_the_student_s_name_and_a_seed_draws_it() -> None:
    mixed = {"b": trained(1, lambda: Net(5)), "a": NETS[0]}
    more: dict[str, Any] = {**SHAPE, "config": SMALL}

    with pytest.raises(OptionError, match="student is None: must be one of Net, Net-2"):
        merge(mixed, **more)
    first, again, other = (predicted(merge(mixed, student="Net-2", seed=seed, **more)) for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


OF_ANOTHER_TYPE: list[tuple[str, Any]] = [
    ("num_classes", "2"), ("input_shape", (1, 4)), ("normalization", 0.5), ("normalization", (0.5, 0.5)),
    ("label_counts", 5), ("label_counts", [5] * 3), ("label_counts", [[1, "x", 1, 1]] * 3), ("num_examples", 7),
    ("log", True), ("proxy", [1]), ("labelled", IMAGES), ("seed", "a"), ("threads", "2"), ("model", Net()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"models": []}, OptionError, "models is empty"),
        *(({name: value}, OptionError, name) for name, value in OF_ANOTHER_TYPE),
        ({"models": [NETS[0].state_dict()]}, OptionError, "model 'client-000' is OrderedDict: needs model="),
        ({"models": {"a b": NETS[0]}}, OptionError, "client name is 'a b'"),
        ({"method": merge}, OptionError, "method is function: must be a name, one of .*tally"),
        ({"method": "taly"}, OptionError, "unknown method 'taly'.*tally"),
        ({"label_counts": COUNTS[:2]}, OptionError, "label_counts has 2 entries: must have one per model, 3"),
        ({"label_counts": {"client-000": [1] * 4}}, OptionError, "label_counts and models differ in 'client-001'"),
        ({"epochs": 3}, OptionError, r"takes no 'epochs': as an option of 'tally' it must be in config=TallyC"),
        ({"sed": 3}, OptionError, "merge takes no 'sed': must be one of .*seed.*; did you mean 'seed'?"),
        ({"threads": -1}, OptionError, "threads is -1: must be a whole number at least 0"),
        ({"label_counts": [[1, 2]] * 3}, UploadError, "label-counts is .*: must be 4 whole numbers"),
        ({"config": FedAvgConfig()}, OptionError, "config is FedAvgConfig: must be TallyConfig"),
        ({"num_classes": 5}, OptionError, "num_classes is 5, but model 'Net' maps 2 images"),
        ({"models": [Net(4)], "model": Net}, UploadError, "model 'client-000'.*conv.weight is float32"),
        ({"models": [Net()], "model": lambda: Net().bfloat16()}, UploadError,
         "model 'client-000': tensor 'conv.weight' is bfloat16 in the architecture: must be float32"),
        ({"models": ["nowhere.pt"], "model": Net}, UploadError, "nowhere.pt does not exist"),
        ({"method": "dw-fedens", "models": [Net(4)], "model": {"a": Net, "b": lambda: Net(2)}, "student": "a"},
         UploadError, "fit none of a, b"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(change: dict[str, Any], error: type[Exception], said: str) -> None:
    given = {"models": NETS, "method": "tally", **SHAPE, **change}

    with pytest.raises(error, match=re.compile(said, re.DOTALL)):
        merge(**given)


def test_a_model_with_an_unknown_class_is_merged_by_fedov() -> None:
    result = merge([trained(seed, lambda: Net(classes=5)) for seed in range(2)], "fedov", **SHAPE)

    assert predicted(result).shape == (3, 4)


class Encoder(nn.Module):
    """Four logits and five features, as FAFI's clients train them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 5)
        self.prototypes = nn.Parameter(torch.randn(4, 5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.encoder(images.flatten(1))
        return torch.cat([features @ self.prototypes.T, features], 1)


def unknowing() -> nn.Module:
    return Net(classes=5)


@pytest.mark.parametrize(
    ("method", "build", "kind"), [("fafi", Encoder, "prototypes"), ("fedov", unknowing, "unknown")]
)
def test_models_of_another_kind_are_merged_whatever_their_builder_is_called(
    tmp_path: Path, method: str, build: Callable[[], nn.Module], kind: str
) -> None:
    models = [trained(seed, build) for seed in range(2)]
    given: list[Any] = [build, {f"net+{kind}": build}, {"net": Net, f"net+{kind}": build}]

    results = [merge(models, method, model=model, **SHAPE) for model in given]

    assert predicted(results[0]).shape == (3, 4)
    assert all(torch.equal(predicted(results[0]), predicted(other)) for other in results[1:])
    for number, result in enumerate(results):
        result.save(tmp_path / str(number))
        loaded = load_ensemble_module(tmp_path / str(number), dict(result.job.builders))
        assert torch.equal(loaded(IMAGES), predicted(result))


def code_of(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "model_card.md").read_text(), re.DOTALL)
    return str(code)


class LazyNet(Net):
    """The same, but its head finds its size by what it first gets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(4)  # type: ignore[assignment]


@pytest.mark.parametrize("model", [None, Net, LazyNet])
def test_the_card_says_what_was_merged_and_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module] | None
) -> None:
    named = {"clinic-a": NETS[0], "clinic-b": NETS[1]}
    result = merge(named, label_counts=COUNTS[:2], config=SMALL, model=model, **SHAPE)
    scores = {
        name: {"accuracy": value, "scores": {"accuracy": {"value": value / 100, "low": 0.6, "high": 0.9}}}
        for name, value in (("student", 71.25), ("ensemble", 80.0))
    }
    result.save(tmp_path, scores)

    text = (tmp_path / "model_card.md").read_text()
    for part in (
        "Merged from clinic-a, clinic-b with Tally",
        "accuracy 71.25 %",
        "accuracy 80.00 %",
        "`server.epochs` = 1",
    ):
        assert part in text
    code, names = code_of(tmp_path), dict[str, Any]()
    assert f"from {__name__} import {(model or Net).__name__}" in code
    monkeypatch.chdir(tmp_path)
    exec(code, names)  # noqa: S102  the code that the card shows
    with torch.no_grad():
        assert torch.equal(names["student"](IMAGES), result.student.eval()(IMAGES))
        assert torch.allclose(names["ensemble"](IMAGES), result.ensemble(IMAGES), atol=1e-6)
