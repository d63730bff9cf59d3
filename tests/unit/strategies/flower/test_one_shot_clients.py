"""OneShot.start with clients of many kinds: different models, missing facts, none at all; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import (
    BUILDERS,
    CLASSES,
    GRID,
    SHAPE,
    TINY_DENSE,
    FakeGrid,
    dense,
    failing,
    linear,
    named,
    net,
    stock,
    strategy,
    weights,
)
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from torch import nn

import strategies.flower.strategies as named_strategies
from strategies import (
    METHODS,
    Dense,
    DenseConfig,
    DWFedENS,
    FedAvgConfig,
    FedENS,
    Fens,
    LabelCountEnsemble,
    Normalization,
    OneShot,
    OneShotFedAvg,
    RunOptions,
)
from strategies.core.errors import OptionError, QuorumError, StoreError
from strategies.run.run_folder import RunFolder

IMAGES = torch.linspace(-1, 1, 5 * 64).view(5, *SHAPE)


def load(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


COUNTS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [8.0, 6.0, 4.0, 2.0]])
SHARES = {
    FedENS: torch.full((2, 1), 0.5),
    DWFedENS: torch.tensor([[1 / 3], [2 / 3]]),
    LabelCountEnsemble: COUNTS / COUNTS.sum(0),
}


@pytest.mark.parametrize("kind", SHARES)
def test_start_with_different_architectures_makes_an_ensemble(tmp_path: Path, kind: Any) -> None:
    counts = [[int(count) for count in row] for row in COUNTS]
    alice = named("alice", 1, architecture="net", label_counts=counts[0])
    bob = named("bob", 2, architecture="linear", label_counts=counts[1])
    found = strategy(kind, tmp_path / "run", model=BUILDERS, student="net")
    found.start(FakeGrid({1: bob, 2: alice}))
    members = [load(net(), weights(1)), load(linear(), weights(2, "linear"))]
    logits = torch.stack([member(IMAGES) for member in members])
    torch.testing.assert_close(found.outcome(IMAGES), (logits * SHARES[kind][:, None]).sum(0))


def test_start_with_different_stock_clients_distils_into_the_student(tmp_path: Path) -> None:
    grid = FakeGrid({1: stock(1), 2: stock(2, architecture="linear"), 3: stock(3)})
    found = strategy(Dense, tmp_path / "run", model=BUILDERS, student="linear", config=TINY_DENSE)
    result = found.start(grid)
    linear().load_state_dict(result.arrays.to_torch_state_dict())
    assert sorted(upload.architecture for upload in found.report.job.uploads) == ["linear", "net", "net"]


def test_start_with_fens_bounds_answers_after_the_upload_as_uploads(tmp_path: Path, said: list[str]) -> None:
    content = RecordDict({"clients": ArrayRecord([np.zeros(300_000, np.float32)])})

    def large_in_rounds(honest: Callable[[Message], Any]) -> Callable[[Message], Any]:
        return lambda message: (
            honest(message)
            if message.metadata.message_type == MessageType.TRAIN
            else Message(content, reply_to=message)
        )

    found = strategy(Fens, tmp_path / "run", options=RunOptions(max_upload_mib=1.0))
    with pytest.raises(QuorumError):
        found.start(FakeGrid({node: large_in_rounds(client) for node, client in GRID.items()}), timeout=1.0)
    assert any("its answer is larger than 1.0 MiB (max-upload-mib)" in line for line in said)


def test_start_with_fedavg_and_different_architectures_refuses_in_one_line(tmp_path: Path) -> None:
    grid = FakeGrid({1: GRID[1], 2: named("bob", 2, architecture="linear")})
    with pytest.raises(OptionError, match=r"needs one architecture for all, 'net'; different are bob \(linear\)\. Ch"):
        strategy(OneShotFedAvg, tmp_path / "run", model=BUILDERS, student="net").start(grid)
    with RunFolder.open(tmp_path / "run") as run:  # the lock is free again
        assert run.round(1).held() == ["alice", "bob"]


def test_start_when_label_counts_are_missing_refuses_in_one_line_and_keeps_the_uploads(tmp_path: Path) -> None:
    grid = FakeGrid({1: GRID[1], 2: named("bob", 2), 3: stock(3)})
    with pytest.raises(
        OptionError, match=r"needs label counts, which .* did not send: anonymous-\w+, bob\. Ch"
    ) as caught:
        strategy(LabelCountEnsemble, tmp_path / "run").start(grid)
    assert "\n" not in str(caught.value)
    replayed = strategy(FedENS, tmp_path / "other").replay(tmp_path / "run")
    assert len(replayed.members) == 3


def test_start_when_the_quorum_is_missed_can_be_tried_again(tmp_path: Path) -> None:
    work: list[str] = []
    found = strategy(OneShotFedAvg, tmp_path / "run")
    with pytest.raises(QuorumError, match="node-2: ValueError: no data"):
        found.start(FakeGrid({1: named("alice", 1, work=work), 2: failing("ValueError: no data")}))
    found.start(FakeGrid({3: named("alice", 1, work=work), 4: named("bob", 2, work=work)}))
    assert work == ["alice", "bob"]
    assert [upload.client for upload in found.report.job.uploads] == ["alice", "bob"]


def test_start_when_nothing_names_a_folder_makes_one_and_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))
    found = strategy(OneShotFedAvg, None)
    found.start(FakeGrid(GRID))
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert found.folder.path == run_dir
    found.close()
    found.close()


def test_start_writes_the_run_s_identity_before_anything_else(tmp_path: Path) -> None:
    found = dense(tmp_path / "run", facts={"note": "mine"}, seed=3)
    with pytest.raises(QuorumError):
        found.start(FakeGrid({}), timeout=1.0)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["method"] == "dense"
    assert info["config"]["epochs"] == 2
    assert (info["seed"], info["threads"], info["student"], info["num-classes"]) == (3, 1, "model", CLASSES)
    assert (info["input-shape"], info["normalization"], info["note"]) == ([1, 8, 8], [[0.5], [0.5]], "mine")


MODELS = "must be a callable that returns an nn.Module, as its class does, or a dict of architecture name -> callable"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {}}, f"model is an empty dict: {MODELS}"),
        ({"model": None}, f"model is a NoneType: {MODELS}"),
        ({"model": linear()}, f"model is a Sequential: {MODELS}"),
        ({"model": {"net": "net"}}, f"model is a str: {MODELS}"),
        ({"model": BUILDERS}, "student is None: must be one of net, linear"),
        ({"model": BUILDERS, "student": "vgg"}, "student is 'vgg': must be one of net, linear"),
        ({"student": "vgg"}, "student is 'vgg': must be one of model"),
        ({"config": FedAvgConfig()}, "config is FedAvgConfig: must be DenseConfig"),
        ({"min_uploads": 0}, "min_uploads is 0: must be a whole number at least 1"),
        ({"fraction_evaluate": 1.5}, "fraction_evaluate is 1.5: must be a number from 0 to 1"),
        ({"fraction_evaluate": float("nan")}, "fraction_evaluate is nan: must be a number from 0 to 1"),
    ],
)
def test_strategy_when_an_argument_is_out_of_range_refuses_it(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError) as caught:
        dense(tmp_path / "run", **changes)
    assert str(caught.value) == reason
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compute": "cluster"}, "setting 'compute' is 'cluster': must be one of 'ray', 'in-process'"),
        ({"num_classes": 7}, "num_classes is 7, but model 'model' maps 2 images of shape (1, 8, 8) to [2, 4]"),
        ({"input_shape": (1, 12, 12)}, "input_shape is (1, 12, 12), and model 'model' does not take such images: "),
        ({"input_shape": (1, 10, 8)}, "the images' shape is (1, 10, 8): method 'dense' needs that the height and the"),
        ({"normalization": Normalization((0.5,) * 3, (0.5,) * 3)}, "must be one mean and one std per channel, 1"),
    ],
)
def test_strategy_whose_server_stage_cannot_work_refuses_before_a_client_does(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError) as caught:
        dense(tmp_path / "run", **changes)
    assert reason in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_options_when_out_of_range_are_refused() -> None:
    with pytest.raises(OptionError, match="'device' is 'gpu': must be auto"):
        RunOptions(device="gpu")
    with pytest.raises(OptionError, match="'max-upload-mib' is 0"):
        RunOptions(max_upload_mib=0.0)


def test_strategy_when_it_has_not_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no outcome yet: call start\(\) or replay\(\) first"):
        _ = dense(tmp_path / "run").outcome


def test_start_when_another_holds_the_folder_refuses(tmp_path: Path) -> None:
    grid = FakeGrid(GRID)
    with RunFolder.create(tmp_path / "run", {}), pytest.raises(StoreError, match="run folder is in use by process"):
        dense(tmp_path / "run").start(grid)
    assert grid.asked == []


def test_every_method_of_the_registry_has_its_strategy() -> None:
    classes = [v for v in vars(named_strategies).values() if isinstance(v, type) and issubclass(v, OneShot)]
    facts = {"num_classes": CLASSES, "input_shape": SHAPE, "proxy": torch.zeros(2, *SHAPE, dtype=torch.uint8)}
    methods = {kind(net, **facts).method.name for kind in classes if kind is not OneShot}
    # Rounds are no OneShot, and two are meant for them: FLBoost is a strategy around another one. FuseFL needs clients
    # of this app, which train block by block.
    assert {*methods, "flboost", "fed-gen", "fusefl"} == set(METHODS)
    assert METHODS["fedavg"].rounds(METHODS["fedavg"].config()) == 1
    assert METHODS["dense"].rounds(DenseConfig(rounds=7)) == 7
    assert METHODS["fens"].rounds(METHODS["fens"].config()) == 1  # its rounds follow one upload


def test_start_averages_the_clients_metrics_by_their_examples(tmp_path: Path) -> None:
    def reporting(name: str, seed: int, **numbers: float) -> Any:
        client = named(name, seed)

        def answer(message: Any) -> Any:
            reply = client(message)
            reply.content["metrics"].update(numbers)
            return reply

        return answer

    # 10 examples beside the seed's number: 10 and 40.
    grid = FakeGrid({1: reporting("alice", 0, loss=1.0, only=5.0), 2: reporting("bob", 30, loss=3.0)})
    result = strategy(OneShotFedAvg, tmp_path / "run").start(grid)
    assert dict(result.train_metrics_clientapp[1]) == {"loss": pytest.approx((10 * 1.0 + 40 * 3.0) / 50)}
