"""FLBoost around strategies of Flower, on a grid of Python functions: rounds, sampling, scores, faults, resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import (
    CLASSES,
    ONE_THREAD,
    SHAPE,
    Client,
    FakeGrid,
    KilledError,
    equal,
    failing,
    net,
    stock,
    weights,
)
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, Result, Strategy
from test_iterative import rows_of, trainer

from strategies import FLBoost, Refiner
from strategies.client.corrections import read_round
from strategies.core.errors import OneShotError, OptionError
from strategies.core.options import option
from strategies.flower.rounds.algorithms import Scaffold
from strategies.method import Job, Method, Outcome, Progress
from strategies.teacher.average import weighted_mean

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class AddConfig:
    """What the trivial refiner adds."""

    amount: float = option(0.25, "added to every trainable parameter")


def add(job: Job, progress: Progress) -> Outcome:
    """Add a constant to the start's parameters, and remember how often."""
    names = [name for name, _ in job.builders[job.student]().named_parameters()]
    times = (job.memory or {"times": torch.zeros(1)})["times"] + 1
    progress.record({"epoch": 1, "times": float(times)})
    student = {key: value + job.config.amount if key in names else value for key, value in job.start.items()}
    return Outcome(student=student, memory={"times": times})


ADD = Refiner(Method(name="add", title="Add", source="this test", config=AddConfig, fit=add), AddConfig())
NOTHING = Refiner(ADD.method, AddConfig(amount=0.0))


def flboost(run_dir: Path, base: Strategy, **changes: Any) -> FLBoost:
    settings = {"refiner": ADD, "compute": "in-process", "options": ONE_THREAD, **changes}
    return FLBoost(net, base=base, num_classes=CLASSES, input_shape=SHAPE, run_dir=run_dir, **settings)


def run(run_dir: Path, base: Strategy, clients: Mapping[int, Client] | FakeGrid, **changes: Any) -> Result:
    said = {key: changes.pop(key) for key in list(changes) if key in STARTING}
    grid: Any = clients if isinstance(clients, FakeGrid) else FakeGrid(clients)
    return flboost(run_dir, base, **changes).start(grid, ArrayRecord(weights(5)), **said)


STARTING = ("num_rounds", "timeout", "train_config", "evaluate_config", "evaluate_fn")


def state_of(result: Result) -> State:
    return dict(result.arrays.to_torch_state_dict())


def client(
    name: str, seed: int, *, asked: list[tuple[str, str, Any]] | None = None, place: Path | None = None
) -> Client:
    """A client that trains from the model sent, and scores it."""
    train = trainer(name, seed, place=place, examples=8 + seed)

    def answer(message: Message) -> Message | None:
        kind = message.metadata.message_type
        if kind == MessageType.QUERY:
            return train(message)
        said, sent = read_round(message)
        if asked is not None:
            asked.append((kind, name, said.get("server-round")))
        if kind == MessageType.TRAIN:
            return train(message)
        score = MetricRecord({"num-examples": 8 + seed, "bias": float(sent["arrays"]["4.bias"].mean())})
        return Message(RecordDict({"metrics": score}), reply_to=message)

    return answer


def clients_of(names: Sequence[str] = ("alice", "bob", "carol"), first: int = 1, **more: Any) -> dict[int, Client]:
    return {first + k: client(name, k + 1, **more) for k, name in enumerate(names)}


# Rounds.


def test_every_round_begins_with_the_refined_model(tmp_path: Path) -> None:
    grid = FakeGrid({1: stock(1, num_examples=10), 2: stock(2, num_examples=30)})
    found = state_of(run(tmp_path / "run", FedAvg(fraction_evaluate=0.0), grid, num_rounds=2))
    asked = [message.content for message in grid.asked if message.metadata.message_type == MessageType.TRAIN]
    begun = [dict(content["arrays"].to_torch_state_dict()) for content in asked]
    mean = weighted_mean([weights(1), weights(2)], [10.0, 30.0])
    names = {name for name, _ in net().named_parameters()}
    wanted = {key: value + 0.25 if key in names else value for key, value in mean.items()}
    for state in (begun[2], begun[3], found):
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value)
    assert equal(begun[0], weights(5))
    assert [row["times"] for row in rows_of(tmp_path / "run")] == [1, 2]  # it remembers


# Faults.


def test_round_in_which_everybody_fails_keeps_the_refined_model(tmp_path: Path, said: list[str]) -> None:
    def busy(good: Client) -> Client:
        def answer(message: Message) -> Message | None:
            failed = message.content["config"].get("server-round") == 2
            return (failing("busy") if failed else good)(message)

        return answer

    nodes = {node: busy(each) for node, each in clients_of().items()}
    biases: dict[int, float] = {}
    run(
        tmp_path / "run", FedAvgM(server_momentum=0.9, fraction_evaluate=0.0), nodes,
        evaluate_fn=lambda n, arrays: biases.update({n: float(arrays.to_torch_state_dict()["4.bias"][0])}),
    )  # fmt: skip
    assert biases[1] == biases[2] != biases[3]
    assert "round 2: 0 usable answers, needs 2: the model stays unchanged" in said


def test_invalid_model_ends_the_run_in_a_line(tmp_path: Path) -> None:
    class Diverging(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            state = arrays.to_torch_state_dict() if arrays else {}
            return ArrayRecord({key: value * float("nan") for key, value in state.items()}), metrics

    with pytest.raises(OneShotError, match="round 1: the strategy's model holds NaN or Inf"):
        run(tmp_path / "run", Diverging(), clients_of())


# Resume.


MADE: dict[str, Callable[[], FedAvg]] = {
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, server_learning_rate=0.7, fraction_train=0.7),
    "FedAdam": lambda: FedAdam(fraction_train=0.7),
    "FedMedian": lambda: FedMedian(),
    "Scaffold": lambda: Scaffold(fraction_train=0.7),
}


@pytest.mark.parametrize(("name", "every"), zip(MADE, (1, 2, 2, 2), strict=True))
def test_run_that_was_cut_off_goes_on_with_the_same_bits(tmp_path: Path, name: str, every: int) -> None:
    def scores(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"bias": float(arrays.to_torch_state_dict()["4.bias"].sum())})

    def killed(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number == 4:
            raise KilledError
        return scores(number, arrays)

    more: dict[str, Any] = {"num_rounds": 5, "checkpoint_every": every}
    whole = run(tmp_path / "whole", MADE[name](), clients_of(place=tmp_path / "a"), evaluate_fn=scores, **more)
    cut, disk = tmp_path / "cut", tmp_path / "b"
    with pytest.raises(KilledError):
        run(cut, MADE[name](), clients_of(place=disk), evaluate_fn=killed, **more)
    seen: list[tuple[str, str, Any]] = []
    # Other nodes behind the same names.
    found = run(cut, MADE[name](), clients_of(place=disk, asked=seen, first=50), evaluate_fn=scores, **more)
    assert equal(state_of(found), state_of(whole))
    assert min(number for _, _, number in seen) == (4 if every == 1 else 3)
    for part in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        metrics = {number: dict(record) for number, record in getattr(found, part).items()}
        assert metrics == {number: dict(record) for number, record in getattr(whole, part).items()}


def test_run_is_not_resumed_by_another_strategy_or_refiner(tmp_path: Path) -> None:
    def killed(number: int, arrays: ArrayRecord) -> None:
        if number == 2:
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path / "run", FedAvgM(server_momentum=0.9), clients_of(), evaluate_fn=killed)
    for base, refiner, reason in (
        (FedAvg(), ADD, "base is 'FedAvg', but the run in .* began with 'FedAvgM'"),
        (FedAvgM(server_momentum=0.5), ADD, "base.server_momentum is 0.5, but"),
        (FedAvgM(server_momentum=0.9), NOTHING, "add.amount is 0.0, but the run in .* began with 0.25"),
    ):
        with pytest.raises(OptionError, match=reason):
            run(tmp_path / "run", base, clients_of(), refiner=refiner)


# Arguments, the run folder, and a caller that owns the loop.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"min_uploads": 0}, "min_uploads is 0"),
        ({"evaluate_every": 0}, "'iterative.evaluate-every' is 0"),
        ({"checkpoint_every": 0}, "'iterative.checkpoint-every' is 0"),
        ({"base": FedAvg}, "base is the class FedAvg"),
        ({"remembers": ("speed",)}, "remembers names 'speed'"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        flboost(tmp_path / "run", **{"base": FedAvg(), **change})
