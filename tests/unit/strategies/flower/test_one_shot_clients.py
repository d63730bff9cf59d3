"""OneShot.start with clients of many kinds: different models, missing facts, none at all; and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import (
    BUILDERS,
    CLASSES,
    GRID,
    SHAPE,
    TINY_DENSE,
    FakeGrid,
    linear,
    named,
    net,
    records,
    stock,
    strategy,
)
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg
from torch import nn

import strategies.flower.strategies as named_strategies
from strategies import (
    METHODS,
    Dense,
    DenseConfig,
    FedAvgConfig,
    FedENS,
    FLBoost,
    Iterative,
    LabelCountEnsemble,
    Normalization,
    OneShot,
    OneShotFedAvg,
)  # fmt: skip
from strategies.core.errors import OptionError


def test_start_with_different_stock_clients_distils_into_the_student(tmp_path: Path) -> None:
    grid = FakeGrid({1: stock(1), 2: stock(2, architecture="linear"), 3: stock(3)})
    found = strategy(Dense, tmp_path / "run", model=BUILDERS, student="linear", config=TINY_DENSE)
    result = found.start(grid)
    linear().load_state_dict(result.arrays.to_torch_state_dict())
    assert sorted(upload.architecture for upload in found.report.job.uploads) == ["linear", "net", "net"]


def test_start_when_label_counts_are_missing_refuses_in_one_line_and_keeps_the_uploads(tmp_path: Path) -> None:
    grid = FakeGrid({1: GRID[1], 2: named("bob", 2), 3: stock(3)})
    with pytest.raises(
        OptionError, match=r"needs label counts, which .* did not send: anonymous-\w+, bob\. .*upload_facts.*\. Ch"
    ):
        strategy(LabelCountEnsemble, tmp_path / "run").start(grid)
    replayed = strategy(FedENS, tmp_path / "other").replay(tmp_path / "run")
    assert len(replayed.members) == 3


MODELS = "must be a callable that returns an nn.Module, as its class does, or a dict of architecture name -> callable"
CALL = "must be a callable without arguments, such as lambda:"


def exactly(line: str) -> str:
    return f"^{re.escape(line)}$"


def around(model: Any, **settings: Any) -> FLBoost:
    return FLBoost(model, base=FedAvg(), **settings)


KINDS = (FedENS, Iterative, around)
SHAPES = (8, (3, 8), (1, *SHAPE), (1, 8, 0), (1, 8.0, 8))
THREE_CHANNELS = Normalization((0.5,) * 3, (0.5,) * 3)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Dense, {"model": {}}, exactly(f"model is an empty dict: {MODELS}")),
    (Dense, {"model": None}, exactly(f"model is a NoneType: {MODELS}")),
    (Dense, {"model": linear()}, exactly(f"model is a Sequential: {MODELS}")),
    (Dense, {"model": nn.Linear},
     exactly(f"model is Linear, which needs in_features, out_features: {CALL} Linear(in_features=...)")),
    (Dense, {"model": lambda channels: nn.Linear(channels, 2)},
     exactly(f"model is your function, which needs channels: {CALL} your_function(channels=...)")),
    (Dense, {"model": {"net": "net"}}, exactly(f"model is a str: {MODELS}")),
    (Dense, {"model": BUILDERS}, exactly("student is None: must be one of net, linear")),
    (Dense, {"model": BUILDERS, "student": "vgg"}, exactly("student is 'vgg': must be one of net, linear")),
    (Dense, {"student": "vgg"}, exactly("student is 'vgg': must be one of model")),
    (Dense, {"config": FedAvgConfig()}, exactly("config is FedAvgConfig: must be DenseConfig")),
    (Dense, {"fraction_evaluate": float("nan")}, exactly("fraction_evaluate is nan: must be a number from 0 to 1")),
    (Dense, {"compute": "cluster"}, "setting 'compute' is 'cluster': must be one of 'auto', 'ray', 'in-process'"),
    (Dense, {"num_classes": 7}, r"num_classes is 7, but model 'model' maps 2 images of shape \(1, 8, 8\) to \[2, 4\]"),
    (Dense, {"input_shape": (1, 12, 12)}, r"shape is \(1, 12, 12\), and model 'model' does not take such images: "),
    (Dense, {"input_shape": (1, 10, 8)}, r"shape is \(1, 10, 8\): method 'dense' needs that the height and the"),
    (Dense, {"normalization": THREE_CHANNELS}, "must be one mean and one std per channel, 1"),
    *((kind, {"input_shape": each}, "^input_shape.*must be three whole numbers above 0, ")
      for kind in KINDS for each in SHAPES),
    *((kind, {"seed": None}, "^seed is None: must be a whole number") for kind in KINDS),
    *((kind, {"run_dir": 5}, "^run_dir is 5: must be the path of a folder, or None for a new one") for kind in KINDS),
    *((kind, {"min_uploads": "two"}, "^min_uploads is 'two': must be a whole number at least 1") for kind in KINDS),
    (OneShotFedAvg, {"proximal_mu": 0.1}, "^OneShotFedAvg.*proximal_mu.*train_config"),
    (OneShotFedAvg, {"fraction_fit": 0.5}, "^OneShotFedAvg.*fraction_fit.*fraction_train"),
    (OneShotFedAvg, {"fraction_train": 0.0}, "^OneShotFedAvg.*fraction_train.*above 0"),
    (OneShotFedAvg, {"server_momentum": 0.9}, "^OneShotFedAvg.*server_momentum.*FLBoost"),
    (OneShotFedAvg, {"train_metrics_aggr_fn": "mean"}, "^OneShotFedAvg.*train_metrics_aggr_fn.*function"),
    (Iterative, {"fraction_train": 0.5}, r"^Iterative.*fraction_train.*base=FedAvg\(fraction_train=...\)"),
    (Iterative, {"initial_parameters": 1}, "^Iterative.*initial_parameters.*initial_arrays"),
    *((OneShotFedAvg, {"normalization": given}, "^normalization is ")
      for given in (0.5, (0.5,), ("0.5", 1.0), ((0.5, 0.5), (1.0,)), (0.5, 0.0))),
    *((FedENS, {"model": build}, rf"has weights of torch.float{bits}: must be float32, by .float\(\)")
      for build, bits in ((lambda: net().half(), 16), (lambda: net().double(), 64))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "line"), REFUSED)
def test_an_argument_without_a_meaning_is_refused_in_one_line_before_a_folder_is_made(
    tmp_path: Path, kind: Any, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionError, match=line) as refusal:
        strategy(kind, **{"run_dir": tmp_path / "run", **({"config": TINY_DENSE} if kind is Dense else {}), **changes})
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_every_method_of_the_registry_has_its_strategy() -> None:
    classes = [v for v in vars(named_strategies).values() if isinstance(v, type) and issubclass(v, OneShot)]
    facts = {"num_classes": CLASSES, "input_shape": SHAPE, "proxy": torch.zeros(2, *SHAPE, dtype=torch.uint8)}
    methods = {kind(net, **facts).method.name for kind in classes if kind is not OneShot}
    # Rounds are no OneShot, and two are meant for them: FLBoost is a strategy around another one. FuseFL needs clients
    # of this app, which train block by block.
    assert {*methods, "flboost", "fed-gen", "fusefl"} == set(METHODS)
    assert METHODS["fedavg"].plan(METHODS["fedavg"].config()).rounds == 1
    assert METHODS["dense"].plan(DenseConfig(rounds=7)).rounds == 7
    assert METHODS["fens"].plan(METHODS["fens"].config()).rounds == 1  # its rounds follow one upload


def test_finite_weights_whose_outputs_overflow_cost_their_client_alone(tmp_path: Path) -> None:
    def eve(message: Message) -> Message:
        state = {key: value.new_full(value.shape, 3e38) for key, value in linear().state_dict().items()}
        return Message(records(state, facts={"client": "eve", "architecture": "linear"}), reply_to=message)

    found = strategy(FedENS, tmp_path / "run", model={"linear": linear})

    honest = {2: named("alice", 1, architecture="linear"), 3: named("bob", 2, architecture="linear")}
    found.start(FakeGrid({1: eve, **honest}))

    assert [upload.client for upload in found.report.job.uploads] == ["alice", "bob"]
    [refused] = found.folder.round(1).refused()
    found.close()
    assert refused["client"] == "eve"
    assert "outputs for normal noise are not (largest value 3e+38)" in refused["reason"]


@pytest.mark.parametrize("kind", [OneShotFedAvg, Iterative])
def test_a_run_folder_is_the_one_meant_when_the_strategy_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setenv("ONESHOT_RUNS", "runs")
    mine = strategy(kind, "mine")  # type: ignore[arg-type]
    new = strategy(kind, None)
    folder = new.folder.path
    new.close()
    monkeypatch.chdir(tmp_path / "other")
    assert mine.folder.path == tmp_path / "one" / "mine"
    assert new.folder.path == folder
    assert folder.is_relative_to(tmp_path / "one")
    mine.close()
    new.close()
    assert list((tmp_path / "other").iterdir()) == []
