"""FLBoost around strategies of Flower, on a grid of Python functions: rounds, sampling, scores, faults, resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import CLASSES, ONE_THREAD, SHAPE, Client, FakeGrid, equal, failing, net, records, stock, weights
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, Result, Strategy
from torch import nn

from strategies import FLBoost, Iterative, IterativeConfig, Refiner
from strategies.client import upload_facts
from strategies.client.corrections import LocalUpdate, read_round
from strategies.client.round_state import RoundState
from strategies.core.errors import OneShotError, OptionError, QuorumError
from strategies.core.options import option
from strategies.flower.rounds.scaffold import Scaffold
from strategies.method import Job, Method, Outcome, Progress
from strategies.teacher.average import weighted_mean

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class AddConfig:
    """What the trivial refiner adds."""

    amount: float = option(0.25, "added to every trainable parameter")


def add(job: Job, progress: Progress) -> Outcome:
    """Add a constant to the start's parameters, and remember how often."""
    assert job.start is not None
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


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def client(
    name: str,
    seed: int,
    *,
    named: bool = True,
    asked: list[tuple[str, str, Any]] | None = None,
    place: Path | None = None,
) -> Client:
    """A client that trains a step from the model sent, and scores it; without a name, a stock one."""
    inputs = torch.randn(8 + seed, *SHAPE, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(8 + seed) % CLASSES

    def answer(message: Message) -> Message:
        kind = message.metadata.message_type
        if kind == MessageType.QUERY:
            content = RecordDict({"upload": upload_facts(client=name)})
            return Message(content, reply_to=message) if named else failing("ValueError: no query function")(message)  # type: ignore[return-value]
        said, sent = read_round(message)
        if asked is not None:
            asked.append((kind, name, said.get("server-round")))
        model = net()
        if kind == MessageType.EVALUATE:
            model.load_state_dict(sent["arrays"])
            score = float(model.state_dict()["4.bias"].mean())
            return Message(
                RecordDict({"metrics": MetricRecord({"num-examples": 8 + seed, "bias": score})}), reply_to=message
            )
        update = LocalUpdate(model, said, sent, memory=RoundState(place, name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (nn.functional.cross_entropy(model.train()(inputs), labels) + update.penalty(model)).backward()
        optimizer.step()
        update.step(0.1)
        sent_back, metrics = update.finish(model)
        content = RecordDict({key: ArrayRecord(state) for key, state in sent_back.items()})
        content["metrics"] = MetricRecord({"num-examples": 8 + seed, **metrics})
        if named:
            content["upload"] = upload_facts(client=name)
        return Message(content, reply_to=message)

    return answer


def clients_of(names: Sequence[str] = ("alice", "bob", "carol"), first: int = 1, **more: Any) -> dict[int, Client]:
    return {first + k: client(name, k + 1, **more) for k, name in enumerate(names)}


# Rounds.


def test_no_rounds_are_refused_and_not_taken_for_the_default(tmp_path: Path) -> None:
    grid = FakeGrid(clients_of())
    with pytest.raises(OptionError, match="num_rounds is 0: must be a whole number at least 1"):
        run(tmp_path / "run", FedAvg(fraction_evaluate=0.0), grid, num_rounds=0)
    assert grid.asked == []


def test_every_round_begins_with_the_refined_model(tmp_path: Path) -> None:
    begun: list[State] = []

    def fixed(seed: int, count: int) -> Client:
        def answer(message: Message) -> Message | None:
            if message.metadata.message_type == MessageType.TRAIN:
                begun.append(dict(message.content["arrays"].to_torch_state_dict()))
            return stock(seed, num_examples=count)(message)

        return answer

    base = FedAvg(fraction_evaluate=0.0)
    found = state_of(run(tmp_path / "run", base, {1: fixed(1, 10), 2: fixed(2, 30)}, num_rounds=2))
    mean = weighted_mean([weights(1), weights(2)], [10.0, 30.0])
    names = {name for name, _ in net().named_parameters()}
    wanted = {key: value + 0.25 if key in names else value for key, value in mean.items()}
    for state in (begun[2], begun[3], found):
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value)
    assert equal(begun[0], weights(5))
    assert [row["times"] for row in rows_of(tmp_path / "run")] == [1, 2]  # it remembers


@pytest.mark.parametrize("make", [FedAvg, lambda **more: FedAvgM(server_momentum=0.9, **more)])
def test_refiner_that_changes_nothing_gives_flower_s_own_result(tmp_path: Path, make: Callable[..., FedAvg]) -> None:
    nodes = {1: client("a", 1, named=False), 2: client("b", 2, named=False)}
    found = run(tmp_path / "run", make(), nodes, refiner=NOTHING)
    grid: Any = FakeGrid(nodes)
    alone = make().start(grid, ArrayRecord(weights(5)), timeout=9.0)
    for key, value in alone.arrays.to_torch_state_dict().items():
        if not key.startswith("1."):  # FedAvgM would step along running variances, too
            torch.testing.assert_close(state_of(found)[key], value)
    if type(make()) is FedAvg:
        for key in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(state_of(found)[key], alone.arrays.to_torch_state_dict()[key])
    assert found.train_metrics_clientapp.keys() == alone.train_metrics_clientapp.keys() == {1, 2, 3}
    assert found.evaluate_metrics_clientapp.keys() == alone.evaluate_metrics_clientapp.keys()
    for number, metrics in alone.train_metrics_clientapp.items():
        assert dict(found.train_metrics_clientapp[number]) == pytest.approx(dict(metrics))


def test_three_rounds_are_flower_s_default_and_the_result_has_flower_s_parts(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        told.append((number, float(arrays.to_torch_state_dict()["4.bias"].mean())))
        return MetricRecord({"bias": told[-1][1]})

    seen: list[tuple[str, str, Any]] = []
    found = run(
        tmp_path / "run", FedAvg(), clients_of(asked=seen), evaluate_fn=evaluate, evaluate_config=ConfigRecord({"a": 1})
    )
    assert [number for number, _ in told] == [0, 1, 2, 3]
    assert {n: r["bias"] for n, r in found.evaluate_metrics_serverapp.items()} == dict(told)
    assert sorted(found.train_metrics_clientapp) == sorted(found.evaluate_metrics_clientapp) == [1, 2, 3]
    for number, bias in told[1:]:  # the clients score the refined model
        assert found.evaluate_metrics_clientapp[number]["bias"] == pytest.approx(bias)
        assert rows_of(tmp_path / "run")[number - 1]["clients_bias"] == pytest.approx(bias)
    assert [kind for kind, _, number in seen if number == 2] == ["train"] * 3 + ["evaluate"] * 3
    traffic = json.loads((tmp_path / "run" / "traffic.json").read_text())["phases"]
    assert set(traffic["evaluation"]["up"]) == {"alice", "bob", "carol"}


def test_evaluations_come_every_so_many_rounds(tmp_path: Path) -> None:
    calls: list[int] = []
    found = run(
        tmp_path / "run", FedAvg(), clients_of(), num_rounds=5, evaluate_every=2,
        evaluate_fn=lambda number, arrays: calls.append(number),
    )  # fmt: skip
    assert calls == [0, 2, 4, 5]
    assert sorted(found.evaluate_metrics_clientapp) == [2, 4, 5]


def test_strategy_that_asks_for_no_scores_gets_none(tmp_path: Path) -> None:
    seen: list[tuple[str, str, Any]] = []
    found = run(tmp_path / "run", FedAvg(fraction_evaluate=0.0), clients_of(asked=seen))
    assert found.evaluate_metrics_clientapp == {}
    assert {kind for kind, _, _ in seen} == {"train"}


def test_scores_that_cannot_be_had_cost_the_scores_only(tmp_path: Path, said: list[str]) -> None:
    def sour(good: Client) -> Client:
        def answer(message: Message) -> Message | None:
            spoilt = message.metadata.message_type == MessageType.EVALUATE
            return (failing("ValueError: no evaluate function") if spoilt else good)(message)

        return answer

    nodes = {node: sour(each) for node, each in clients_of().items()}
    assert run(tmp_path / "a", FedAvg(), nodes).evaluate_metrics_clientapp == {}
    assert said.count("refused alice: scores: ValueError: no evaluate function") == 1
    assert run(tmp_path / "b", FedAvg(min_evaluate_nodes=9), clients_of()).evaluate_metrics_clientapp == {}
    assert "round 1: no scores of the clients: 3 clients are connected, the strategy waits for 9" in said


# Who is asked.


def asked_in(
    run_dir: Path, nodes: Mapping[int, Client] | FakeGrid, seen: list[tuple[str, str, Any]], **more: Any
) -> Any:
    seen.clear()
    run(run_dir, FedAvg(fraction_train=0.4, fraction_evaluate=0.4, min_evaluate_nodes=1), nodes, num_rounds=4, **more)
    return sorted(seen, key=lambda each: (each[2], each[0], each[1]))


def test_named_clients_are_the_same_in_every_run_whatever_their_nodes(tmp_path: Path) -> None:
    seen: list[tuple[str, str, Any]] = []
    names = ("ann", "ben", "cat", "dan", "eve")
    first = asked_in(tmp_path / "a", clients_of(names, asked=seen), seen)
    assert len(first) == 4 * (2 + 2)
    turned = dict(zip((95, 40, 63, 12, 77), clients_of(names, asked=seen).values(), strict=True))
    assert asked_in(tmp_path / "b", turned, seen) == first
    assert asked_in(tmp_path / "c", turned, seen, seed=1) != first
    assert len({name for _, name, _ in first}) > 2


class Registered(FakeGrid):
    """A grid that knows when its nodes have registered, as Flower's does."""

    def __init__(self, nodes: Mapping[int, Client], **more: Any) -> None:
        super().__init__(nodes, **more)
        self._order = list(nodes)

    def get_nodes(self) -> list[NodeInfo]:
        times = {node: f"2026-01-01T00:00:0{k}{'.5' if k % 2 else ''}+00:00" for k, node in enumerate(self._order)}
        return [NodeInfo(node_id=node, registered_at=times[node]) for node in sorted(self._order)]


def test_stock_clients_are_the_same_in_every_run_by_their_registration(tmp_path: Path, said: list[str]) -> None:
    seen: list[tuple[str, str, Any]] = []
    made = list(clients_of(("ann", "ben", "cat", "dan", "eve"), asked=seen, named=False).values())
    first = asked_in(tmp_path / "a", Registered(dict(zip((9, 4, 6, 1, 7), made, strict=True))), seen)
    assert asked_in(tmp_path / "b", Registered(dict(zip((5, 8, 2, 3, 10), made, strict=True))), seen) == first
    assert sum("5 clients have no names, so their nodes' order of registration" in line for line in said) == 2
    states = [json.loads((tmp_path / each / "traffic.json").read_text())["phases"]["rounds"] for each in "ab"]
    assert states[0]["up"] == states[1]["up"]
    assert set(states[0]["up"]) <= {f"unnamed-00{k}" for k in range(5)}


def test_refiner_sees_stock_clients_in_the_order_of_their_registration(tmp_path: Path) -> None:
    seen: list[list[tuple[str, int | None]]] = []

    def listen(job: Job, progress: Progress) -> Outcome:
        seen.append([(upload.client, upload.num_examples) for upload in job.uploads])
        return add(job, progress)

    refiner = Refiner(
        Method(name="listen", title="Listen", source="this test", config=AddConfig, fit=listen), AddConfig()
    )
    made = clients_of(named=False).values()
    run(tmp_path / "run", FedAvg(), Registered(dict(zip((9, 4, 6), made, strict=True))), refiner=refiner, num_rounds=2)
    assert seen == [[("unnamed-000", 9), ("unnamed-001", 10), ("unnamed-002", 11)]] * 2


def test_clients_of_whom_nothing_is_known_are_another_draw_and_a_line_says_so(tmp_path: Path, said: list[str]) -> None:
    seen: list[tuple[str, str, Any]] = []
    nodes = clients_of(("ann", "ben", "cat", "dan", "eve"), asked=seen, named=False)
    assert len(asked_in(tmp_path / "a", nodes, seen)) == 16
    line = "5 clients have no names, so each round asks other clients in every run"
    assert said.count(line) == 1


def test_strategy_that_asks_everybody_asks_for_no_names(tmp_path: Path) -> None:
    grid = FakeGrid(clients_of())
    run(tmp_path / "run", FedAvg(), grid)
    assert grid.of_type(MessageType.QUERY) == []
    few = FakeGrid(clients_of())
    run(tmp_path / "few", FedAvg(fraction_train=0.5), few)
    assert sorted(few.of_type(MessageType.QUERY)) == [1, 2, 3]  # once, not in every round


def test_as_many_clients_are_waited_for_as_the_strategy_wants(tmp_path: Path) -> None:
    late = FakeGrid(clients_of(), joins={3: 60})
    run(tmp_path / "run", FedAvg(min_available_nodes=3, fraction_evaluate=0.0), late)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]
    with pytest.raises(
        QuorumError, match="3 clients are connected after 9 s, min-uploads is 2, the strategy waits for 5"
    ):
        run(tmp_path / "none", FedAvg(min_available_nodes=5), clients_of(), timeout=9.0)


def test_quorum_is_no_larger_than_the_sample(tmp_path: Path) -> None:
    base = FedAvg(fraction_train=0.2, min_train_nodes=1, fraction_evaluate=0.0)
    run(tmp_path / "run", base, clients_of(), min_uploads=3)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [1, 1, 1]


def test_client_that_still_owes_an_answer_is_left_out_of_the_sample(tmp_path: Path) -> None:
    grid = FakeGrid(clients_of(), delays={3: 75})
    run(tmp_path / "run", FedAvg(fraction_evaluate=0.0), grid, num_rounds=4, timeout=5.0)
    assert [row["answers"] for row in rows_of(tmp_path / "run")][:2] == [2, 2]
    assert grid.of_type().count(3) < 4


# Faults.


def test_client_of_another_architecture_is_refused_by_name(tmp_path: Path, said: list[str]) -> None:
    nodes = {**clients_of(), 9: stock(9, architecture="linear"), 8: failing("OSError: disk")}
    run(tmp_path / "run", FedAvg(fraction_evaluate=0.0), nodes)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]
    assert any(line.startswith("refused node-9: arrays do not fit architecture 'model'") for line in said)
    assert "refused node-8: OSError: disk" in said


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


def test_round_without_a_model_is_not_refined(tmp_path: Path, said: list[str]) -> None:
    class Sometimes(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return (None, None) if server_round == 2 else super().aggregate_train(server_round, replies)

    biases: dict[int, float] = {}
    run(
        tmp_path / "run", Sometimes(fraction_evaluate=0.0), clients_of(),
        evaluate_fn=lambda n, arrays: biases.update({n: float(arrays.to_torch_state_dict()["4.bias"][0])}),
    )  # fmt: skip
    assert biases[1] == biases[2] != biases[3]
    assert [row.get("times") for row in rows_of(tmp_path / "run")] == [1, None, 2]
    assert any("round 2: strategy Sometimes made no model of 3 answers" in line for line in said)


def test_invalid_model_ends_the_run_in_a_line(tmp_path: Path) -> None:
    class Diverging(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            state = arrays.to_torch_state_dict() if arrays else {}
            return ArrayRecord({key: value * float("nan") for key, value in state.items()}), metrics

    with pytest.raises(OneShotError, match="round 1: the strategy's model holds NaN or Inf"):
        run(tmp_path / "run", Diverging(), clients_of())


# Resume.


class KilledError(Exception):
    """Stands for whatever ends a process."""


MADE: dict[str, Callable[[], FedAvg]] = {
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, server_learning_rate=0.7, fraction_train=0.7),
    "FedAdam": lambda: FedAdam(fraction_train=0.7),
    "FedMedian": lambda: FedMedian(),
    "Scaffold": lambda: Scaffold(fraction_train=0.7),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", MADE)
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


def test_finished_run_is_read_and_no_client_asked(tmp_path: Path) -> None:
    whole = run(tmp_path / "run", FedAvg(), clients_of())
    grid = FakeGrid(clients_of())
    assert equal(state_of(run(tmp_path / "run", FedAvg(), grid)), state_of(whole))
    assert grid.asked == []


# Arguments, the run folder, and a caller that owns the loop.


def test_default_refiner_is_flboost_and_runs(tmp_path: Path) -> None:
    facts = {"num_classes": CLASSES, "input_shape": SHAPE, "compute": "in-process", "options": ONE_THREAD}
    default = FLBoost(net, base=FedAvg(), **facts)  # type: ignore[arg-type]
    assert default.job.config.refiner == "flboost"
    assert default.job.config.rounds == 3


def test_run_folder_names_the_method_and_its_base(tmp_path: Path) -> None:
    strategy = flboost(tmp_path / "run", FedAvgM(server_momentum=0.9), facts={"site": "lab"})
    strategy.start(FakeGrid(clients_of()), ArrayRecord(weights(5)), num_rounds=1)  # type: ignore[arg-type]
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["config"]["base"] == info["base"] == "FedAvgM"
    assert (info["base.server_momentum"], info["add.amount"], info["site"]) == (0.9, 0.25, "lab")
    assert strategy.outcome(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)
    assert strategy.job.config.title == "refined FedAvgM, 1 rounds"


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


def test_own_loop_ends_with_the_bits_of_start(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", FedAvgM(server_momentum=0.9), clients_of(), num_rounds=2)
    found, grid = flboost(tmp_path / "run", FedAvgM(server_momentum=0.9)), FakeGrid(clients_of())
    arrays: ArrayRecord | None = ArrayRecord(weights(5))
    for number in (1, 2):
        assert arrays is not None
        messages = found.configure_train(number, arrays, ConfigRecord(), grid)  # type: ignore[arg-type]
        arrays, _ = found.aggregate_train(number, grid.send_and_receive(messages, timeout=5.0))
    assert arrays is not None
    assert equal(dict(arrays.to_torch_state_dict()), state_of(whole))
    found.close()


def test_message_type_of_a_strategy_s_own_is_kept(tmp_path: Path) -> None:
    class Special(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            messages = super().configure_train(server_round, arrays, config, grid)
            return [
                Message(message.content, dst_node_id=message.metadata.dst_node_id, message_type="train.special")
                for message in messages
            ]

    grid = FakeGrid({1: stock(1), 2: stock(2)})
    run(tmp_path / "run", Special(fraction_evaluate=0.0), grid, num_rounds=1)
    assert grid.of_type("train.special") == [1, 2]


def test_rounds_of_the_app_ask_no_client_for_scores(tmp_path: Path) -> None:
    grid: Any = FakeGrid({1: stock(1), 2: stock(2)})
    config = IterativeConfig(rounds=1)
    Iterative(
        net, num_classes=CLASSES, input_shape=SHAPE, config=config, run_dir=tmp_path / "run", options=ONE_THREAD
    ).start(grid, ArrayRecord(weights(5)))
    assert {message.metadata.message_type for message in grid.asked} == {"train"}
    assert records(None)["metrics"]["num-examples"] == 10  # type: ignore[index]


@pytest.mark.parametrize("make", [FedAdam, lambda: FedAvgM(server_momentum=0.9), lambda: Scaffold(server_lr=0.5)])
def test_state_of_a_strategy_object_does_not_outlive_a_failed_start(tmp_path: Path, make: Callable[[], Any]) -> None:
    def after_one_round_failing(k: int) -> Client:
        left = [client(f"c{k}", k, place=tmp_path / "disk")] * 2  # asked for its name, then to train
        return lambda message: (left.pop() if left else failing("a fault"))(message)

    def fresh(name: str, base: Strategy) -> FLBoost:
        return flboost(tmp_path / name, base, checkpoint_every=10)

    def result(strategy: FLBoost, place: str) -> State:
        grid: Any = FakeGrid({k: client(f"c{k}", k, place=tmp_path / place) for k in (1, 2)})
        return state_of(strategy.start(grid, ArrayRecord(weights(5)), num_rounds=4))

    wanted, again = result(fresh("wanted", make()), "disk-1"), fresh("again", make())
    with pytest.raises(QuorumError):
        again.start(FakeGrid({k: after_one_round_failing(k) for k in (1, 2)}), ArrayRecord(weights(5)), num_rounds=4)  # type: ignore[arg-type]
    assert equal(result(again, "disk-2"), wanted)


def test_a_run_without_a_checkpoint_begins_with_the_state_that_the_strategy_was_given_with(tmp_path: Path) -> None:
    base = FedAvgM(server_momentum=0.9)
    mine = flboost(tmp_path / "run", base)
    base.momentum_vector = [torch.full((1,), 9.0).numpy()]
    grid: Any = FakeGrid({k: client(f"c{k}", k) for k in (1, 2)})
    found = state_of(mine.start(grid, ArrayRecord(weights(5)), num_rounds=1))
    assert equal(found, state_of(run(tmp_path / "other", FedAvgM(server_momentum=0.9), dict(grid.nodes), num_rounds=1)))
