"""OneShot.start in one go: its result and its scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import (
    GRID,
    ONE_THREAD,
    SHAPE,
    TINY,
    FakeGrid,
    answering,
    dense,
    equal,
    failing,
    linear,
    net,
    records,
    stock,
    strategy,
    weights,
)
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord
from torch import nn

from strategies import DenseConfig, FedENS, OneShotFedAvg, load_ensemble_module
from strategies.core.errors import OneShotError, OptionError
from strategies.run.run_folder import RunFolder

IMAGES = torch.linspace(-1, 1, 5 * 64).view(5, *SHAPE)


def mean_of_inputs(model: nn.Module) -> dict[str, float]:
    assert not model.training
    with torch.no_grad():
        return {"mean": float(model(IMAGES).mean())}


def test_start_with_dense_returns_a_student_that_loads_and_is_stored(tmp_path: Path) -> None:
    found = dense(tmp_path / "run")
    with pytest.raises(OptionError, match=r"no outcome yet: call start\(\) or replay\(\) first"):
        _ = found.outcome
    result = found.start(FakeGrid(GRID), ArrayRecord(weights(5)))
    student = result.arrays.to_torch_state_dict()
    net().load_state_dict(student)
    assert all(torch.isfinite(value).all() for value in student.values())
    assert not equal(student, weights(5))
    assert equal(dict(found.outcome.state_dict()), dict(student))
    with RunFolder.open(tmp_path / "run", write=False) as run:
        stored = run.student()
        assert equal(stored, dict(student))
        assert run.round(1).held() == ["alice", "bob"]
    assert {"clients", "server", "evaluation"} == set(found.account.seconds)
    assert set(found.account.traffic.up) == {"alice", "bob"}


def test_start_evaluates_a_student_before_and_after(tmp_path: Path) -> None:
    calls: list[tuple[int, ArrayRecord]] = []
    kept = MetricRecord({"accuracy": 0.5})

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        calls.append((server_round, arrays))
        return kept

    start = ArrayRecord(weights(5))
    found = dense(tmp_path / "run", evaluate_model=mean_of_inputs)
    result = found.start(FakeGrid(GRID), start, evaluate_fn=evaluate)
    assert [server_round for server_round, _ in calls] == [0, 1]
    assert calls[0][1] is start
    assert equal(dict(calls[1][1].to_torch_state_dict()), dict(result.arrays.to_torch_state_dict()))
    # The caller's own record stays as it was.
    assert result.evaluate_metrics_serverapp[0] == {"accuracy": 0.5}
    assert result.evaluate_metrics_serverapp[1] == {"accuracy": 0.5, **mean_of_inputs(found.outcome)}


def test_an_ensemble_is_scored_by_evaluate_model_and_its_average_by_evaluate_fn(
    tmp_path: Path, said: list[str]
) -> None:
    found = strategy(FedENS, tmp_path / "run", evaluate_model=mean_of_inputs)
    result = found.start(FakeGrid(GRID), ArrayRecord(weights(5)), evaluate_fn=lambda n, a: MetricRecord({"norm": n}))
    mean = {key: (weights(1)[key] + weights(2)[key]) / 2 for key in ("4.weight", "4.bias")}
    arrays = result.arrays.to_torch_state_dict()
    torch.testing.assert_close({key: arrays[key] for key in mean}, mean)
    assert result.evaluate_metrics_serverapp == {0: {"norm": 0}, 1: {"norm": 1, **mean_of_inputs(found.outcome)}}
    (line,) = [line for line in said if "load it with" in line]
    call = line.partition("oneshot_fl.")[2]
    names = {"load_ensemble_module": load_ensemble_module, "net": net}
    stored = eval(call, names)  # noqa: S307  the line of the log, as a user runs it
    torch.testing.assert_close(stored(IMAGES), found.outcome(IMAGES), rtol=0, atol=0)
    members = [load(net(), weights(seed))(IMAGES) for seed in (1, 2)]
    torch.testing.assert_close(found.outcome(IMAGES), torch.stack(members).mean(0))


def test_an_ensemble_of_several_architectures_has_no_arrays_and_says_so(tmp_path: Path, said: list[str]) -> None:
    called: list[int] = []
    found = strategy(
        FedENS, tmp_path / "run", model={"net": net, "linear": linear}, student="net", fraction_evaluate=1.0
    )
    grid = FakeGrid({1: stock(1), 2: stock(2, architecture="linear")})
    result = found.start(grid, evaluate_fn=lambda number, _: called.append(number))
    for read in (result.arrays.to_torch_state_dict, result.arrays.to_numpy_ndarrays):
        with pytest.raises(OneShotError, match="no single model.*load_ensemble_module"):
            read()
    assert called == []
    assert sum("fraction_evaluate is ignored" in line for line in said) == 1


def load(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def test_start_sends_initial_arrays_and_settings_and_begins_the_student_there(tmp_path: Path) -> None:
    grid, start = FakeGrid(GRID), ArrayRecord(weights(5))
    settings = ConfigRecord({"lr": 0.1})
    config = DenseConfig(**{**TINY, "student_lr": 1e-12})
    found = dense(tmp_path / "run", config=config)
    result = found.start(grid, start, train_config=settings)
    asked = grid.asked[0].content
    assert equal(dict(asked["arrays"].to_torch_state_dict()), weights(5))
    with RunFolder.open(tmp_path / "run", write=False) as run:
        facts = {"lr": 0.1, "server-round": 1, "run-id": run.id, "seed": 0}
    assert asked["config"] == ConfigRecord(facts)
    assert settings == ConfigRecord({"lr": 0.1})
    # With a rate this small the student stays where it began: at the initial arrays.
    student = result.arrays.to_torch_state_dict()
    torch.testing.assert_close(student["4.weight"], weights(5)["4.weight"], rtol=0, atol=1e-9)
    fresh = dense(tmp_path / "fresh", config=config).start(FakeGrid(GRID)).arrays.to_torch_state_dict()
    assert (fresh["4.weight"] - weights(5)["4.weight"]).abs().max() > 0.01


def evaluates(score: float, examples: int = 10) -> Any:
    scores = answering(records(None, num_examples=examples, accuracy=score))
    return lambda message: (stock(examples) if message.metadata.message_type == MessageType.TRAIN else scores)(message)


def test_start_when_asked_to_lets_clients_evaluate_the_student(tmp_path: Path, said: list[str]) -> None:
    grid = FakeGrid({1: evaluates(0.2, 10), 2: evaluates(0.8, 30)})
    found = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=1.0)
    result = found.start(grid, evaluate_config=ConfigRecord({"batch": 7}))
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx((10 * 0.2 + 30 * 0.8) / 40)
    assert sorted(line for line in said if line.startswith("scores of")) == [
        "scores of node-1: {'num-examples': 10, 'accuracy': 0.2}",
        "scores of node-2: {'num-examples': 30, 'accuracy': 0.8}",
    ]
    asked = [m for m in grid.asked if m.metadata.message_type == MessageType.EVALUATE]
    assert len(asked) == 2
    assert asked[0].content["config"]["batch"] == 7
    assert equal(dict(asked[0].content["arrays"].to_torch_state_dict()), dict(result.arrays.to_torch_state_dict()))


def test_teacher_of_a_strategy_may_be_tallys_pool(tmp_path: Path) -> None:
    ends = {}
    for name, given in {"own": "method", "tally": "tally", "again": "tally"}.items():
        found = dense(tmp_path / name, options=replace(ONE_THREAD, teacher=given))
        ends[name] = dict(found.start(FakeGrid(GRID)).arrays.to_torch_state_dict())
        with RunFolder.open(tmp_path / name, write=False) as run:
            assert run.info["teacher"] == given
    assert equal(ends["tally"], ends["again"])
    assert not equal(ends["tally"], ends["own"])
    replayed = dense(None, options=replace(ONE_THREAD, teacher="tally")).replay(tmp_path / "own")
    assert equal(dict(replayed.state_dict()), ends["tally"])


def test_evaluate_step_asks_a_share_of_the_nodes(tmp_path: Path) -> None:
    grid = FakeGrid(dict.fromkeys(range(1, 5), failing("")))
    found = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=0.5)
    messages = list(found.configure_evaluate(1, ArrayRecord(weights(5)), ConfigRecord(), grid))  # type: ignore[arg-type]
    assert len(messages) == 2
    assert {m.metadata.message_type for m in messages} == {MessageType.EVALUATE}
