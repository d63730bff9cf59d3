"""The form of a round's answers: one client's records, whatever they are called, cost no other client the round."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import Client, equal, stock, weights
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy
from test_iterative import iterative, refusals_of, result_of, rows_of, trainer

from strategies.core.errors import QuorumError
from strategies.flower.messages import Reply
from strategies.flower.rounds.answers import Answered, of_one_form, show
from strategies.flower.rounds.base import EVERYONE, Base
from strategies.flower.rounds.feddyn import FedDyn
from strategies.flower.rounds.fednova import FedNova
from strategies.flower.rounds.round_records import in_row
from strategies.flower.rounds.scaffold import Scaffold
from strategies.rounds.config import TITLES

State = dict[str, torch.Tensor]
Change = Callable[[RecordDict], None]


def surplus(content: RecordDict) -> None:
    content["zzz"] = ArrayRecord({"a": Array(np.zeros(1, np.float32))})


def renamed_arrays(content: RecordDict) -> None:
    content["model"] = content.pop("arrays")


def renamed_metrics(content: RecordDict) -> None:
    content["numbers"] = content.pop("metrics")


def config_in_their_place(content: RecordDict) -> None:
    renamed_metrics(content)
    content["metrics"] = ConfigRecord({"a": 1})


def empty_metrics(content: RecordDict) -> None:
    content["a"] = content.pop("metrics")
    content["metrics"] = MetricRecord()


def two_metrics(content: RecordDict) -> None:
    content["z"] = MetricRecord({"num-examples": 5})


CHANGES: tuple[Change, ...] = (
    surplus, renamed_arrays, renamed_metrics, config_in_their_place, empty_metrics, two_metrics,
)  # fmt: skip


def changed(client: Client, change: Change) -> Client:
    """A client whose answers have another form."""

    def answer(message: Message) -> Message | None:
        reply = client(message)
        if reply is not None and message.metadata.message_type == MessageType.TRAIN:
            change(reply.content)
        return reply

    return answer


def four(place: Path, change: Change | None = None) -> dict[int, Client]:
    """Four clients, of whom the last may answer in another form."""
    clients = {k: trainer(f"c{k}", 1, place=place, examples=8 + k) for k in range(1, 5)}
    return clients if change is None else {**clients, 4: changed(clients[4], change)}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fednova", "feddyn", "scaffold", "stc"])
def test_answer_in_another_form_counts_or_is_refused_alone(tmp_path: Path, name: str, change: Change) -> None:
    more: dict[str, Any] = {"strategy": name, "rounds": 2}
    clean = result_of(iterative(tmp_path / "clean", **more), four(tmp_path / "a"))
    found = result_of(iterative(tmp_path / "run", **more), four(tmp_path / "b", change))
    answers = [row["answers"] for row in rows_of(tmp_path / "run")]
    if answers == [4, 4]:
        assert equal(found, clean)
        return
    assert answers == [3, 3]
    assert {client for client, _ in refusals_of(tmp_path / "run")} <= {"node-4", "c4"}
    assert not torch.equal(found["0.weight"], weights(5)["0.weight"])


def test_every_strategy_has_the_same_bits_whatever_its_clients_call_their_records(tmp_path: Path) -> None:
    def all_renamed(content: RecordDict) -> None:
        renamed_arrays(content)
        renamed_metrics(content)

    for name in (name for name in TITLES if name not in ("scaffold", "stc")):  # whose answers have two array records
        clean = result_of(iterative(tmp_path / f"{name}-a", strategy=name, rounds=2), four(tmp_path / "a"))
        clients = {node: changed(client, all_renamed) for node, client in four(tmp_path / "b").items()}
        assert equal(result_of(iterative(tmp_path / f"{name}-b", strategy=name, rounds=2), clients), clean), name


def answered(client: str, **content: Any) -> Answered:
    """An answer whose model is one array."""
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    facts: Any = None
    reply = Reply(facts, {"w": torch.ones(2)})
    return Answered(client, Message(RecordDict(), reply_to=question), RecordDict(content), reply)


def forms_of(strategy: Strategy, *answers: Answered) -> list[list[str]]:
    return [list(message.content) for message in show(strategy, answers, ["w"])]


MODEL, NUMBERS = ArrayRecord({"w": torch.zeros(2)}), MetricRecord({"num-examples": 5})


def test_names_are_those_of_most_clients_and_in_a_tie_the_strategy_s() -> None:
    own, usual = {"model": MODEL, "m": NUMBERS}, {"arrays": MODEL, "metrics": NUMBERS}
    many = [answered("a", **usual), answered("b", **own), answered("c", **own)]
    assert forms_of(FedAvg(), *many) == [["model", "m"]] * 3
    assert forms_of(FedAvg(), answered("b", **own), answered("a", **usual)) == [["arrays", "metrics"]] * 2
    keyed = {"model": MODEL, "metrics": NUMBERS}
    tied = [answered("a", **usual), answered("b", **keyed)]
    assert forms_of(FedAvg(arrayrecord_key="model"), *tied) == [["model", "metrics"]] * 2
    # Each one's names are the other's in turn.
    turned = [answered("a", x=MODEL, y=NUMBERS), answered("b", y=MODEL, x=NUMBERS)]
    assert forms_of(FedAvg(), *turned) == [["x", "y"]] * 2


def test_further_array_records_are_those_of_the_strategy_or_of_all_clients() -> None:
    usual = {"arrays": MODEL, "metrics": NUMBERS, "upload": ConfigRecord({"client": "a"})}
    more = {**usual, "control": MODEL, "statistics": MODEL}
    both = [answered("a", **more), answered("b", **more, zzz=MODEL)]
    assert forms_of(FedAvg(), *both) == [["arrays", "metrics", "upload", "control", "statistics"]] * 2
    one = [answered("a", **usual), answered("b", **more)]
    assert forms_of(FedAvg(), *one) == [["arrays", "metrics", "upload"]] * 2
    kept = [["arrays", "metrics", "upload"], ["arrays", "metrics", "upload", "control"]]
    assert forms_of(Scaffold(), *one) == kept


def test_strategy_of_a_project_reads_its_own_records_beside_a_client_without_them(tmp_path: Path) -> None:
    class Reading(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            assert {tuple(reply.content.array_records) for reply in replies} == {("model",)}
            return super().aggregate_train(server_round, replies)

    clients = {k: changed(stock(k), renamed_arrays) for k in (1, 2, 3)}
    found = result_of(iterative(tmp_path / "run", base=Base(Reading(**EVERYONE)), rounds=1), {**clients, 4: stock(4)})
    whole = {k: stock(k) for k in (1, 2, 3, 4)}
    assert equal(found, result_of(iterative(tmp_path / "clean", rounds=1), whole))


@pytest.mark.parametrize("make", [FedNova, lambda **more: FedDyn(alpha=0.1, **more)])
def test_own_strategies_take_models_under_any_name(make: Callable[..., Any]) -> None:
    strategy, w = make(**EVERYONE), {"w": np.zeros(2, np.float32)}
    strategy.mean_drift = w
    answer = RecordDict({"net": MODEL, "m": MetricRecord({"num-examples": 5, "travel": 0.1})})
    assert strategy.step(w, [answer], num_clients=1)["w"].tolist() == [0.0, 0.0]


def own_average(contents: list[RecordDict], weight: str) -> MetricRecord:
    """A project's own average, which reads a number by its name."""
    del weight
    return MetricRecord({"loss": sum(float(content["metrics"]["loss"]) for content in contents) / len(contents)})  # type: ignore[arg-type, index]


def with_loss(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({**content.metric_records["metrics"], "loss": 0.5})


def test_client_without_a_number_that_a_project_s_own_average_reads_costs_its_answer_alone(tmp_path: Path) -> None:
    clients = {k: changed(stock(k), with_loss) for k in (1, 2, 3)}
    made = {"base": Base(FedAvg(**EVERYONE, train_metrics_aggr_fn=own_average)), "rounds": 2}
    found = result_of(iterative(tmp_path / "run", **made), {**clients, 4: stock(4)})

    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3]
    ((_, reason),) = refusals_of(tmp_path / "run")
    sent = "which the strategy may compute with and most clients send as a finite number"
    assert reason == f"its numbers lack loss, {sent}"
    assert equal(found, result_of(iterative(tmp_path / "clean", rounds=2), clients))
    # Flower's average of the number is that of the others, and the client stays in.
    result_of(iterative(tmp_path / "flower", rounds=2), {**clients, 4: stock(4)})
    assert [row["answers"] for row in rows_of(tmp_path / "flower")] == [4, 4]


def test_each_client_without_such_a_number_is_refused_whatever_node_it_claims_to_be(tmp_path: Path) -> None:
    def claiming(message: Message) -> Message | None:
        reply = stock(1)(message)
        if reply is not None:
            reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    clients = {k: changed(stock(k), with_loss) for k in (1, 2, 3)}
    base = Base(FedAvg(**EVERYONE, train_metrics_aggr_fn=own_average))
    result_of(iterative(tmp_path / "run", base=base, rounds=1), {**clients, 4: claiming, 5: claiming})

    assert [client for client, _ in refusals_of(tmp_path / "run")] == ["node-4", "node-5"]


def numbers(client: str, **values: Any) -> Answered:
    return answered(client, arrays=MODEL, metrics=MetricRecord({"num-examples": 5, **values}))


@pytest.mark.parametrize("hostile", [{"loss": float("nan")}, {"loss": float("inf")}, {"loss": [1.0]}, {}])
def test_a_client_that_tells_no_finite_number_leaves_the_average_to_the_others(hostile: dict[str, Any]) -> None:
    answers = [numbers("a", loss=1.0), numbers("b", loss=2.0), numbers("c", **hostile)]
    strategy = FedAvg(**EVERYONE)

    _, told = strategy.aggregate_train(1, show(strategy, answers, ["w"]))

    assert told == {"loss": pytest.approx(1.5)}
    assert [each.client for each in of_one_form(FedAvg(train_metrics_aggr_fn=own_average), answers)[0]] == ["a", "b"]


def test_numbers_that_most_clients_send_count_one_by_one_whatever_else_a_client_sends() -> None:
    own = FedAvg(**EVERYONE, train_metrics_aggr_fn=own_average)
    lists = [numbers(f"c{k}", loss=0.5, losses=[0.5] * (k + 1)) for k in range(6)]
    different = [numbers("a", loss=0.5, x=1.0), *(numbers(f"c{k}", loss=0.5, **{f"own-{k}": 1.0}) for k in range(4))]

    for answers in (lists, different, different[:2]):
        assert of_one_form(own, answers) == (answers, {})


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_whose_rounds_all_fail_has_no_result(tmp_path: Path, rounds: int) -> None:
    made = {"base": Base(FedAvg(**EVERYONE, train_metrics_aggr_fn=own_average)), "rounds": rounds}
    with pytest.raises(QuorumError, match=f"none of the {rounds} rounds made a model"):
        result_of(iterative(tmp_path / "run", **made), {k: stock(k) for k in (1, 2)})
    assert not (tmp_path / "run" / "outcome.json").exists()


def test_error_of_a_project_s_own_average_costs_the_round_and_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = {"base": Base(FedAvg(**EVERYONE, train_metrics_aggr_fn=own_average)), "rounds": 3}
    with caplog.at_level("WARNING"), pytest.raises(QuorumError, match="round 3: no model of 2 answers, for the 3rd"):
        result_of(iterative(tmp_path / "run", **made), {k: stock(k) for k in (1, 2)})
    assert re.search(r"KeyError: 'loss' \(\S+test_round_answers\.py:\d+\)", caplog.text)


# Rounds without a model.


class Silent(FedAvg):
    """FedAvg that makes no model in some rounds."""

    def __init__(self, *without: int) -> None:
        super().__init__(**EVERYONE)
        self._without = without

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return (None, None) if server_round in self._without else super().aggregate_train(server_round, replies)


def test_rounds_without_a_model_end_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = "round 4: no model of 2 answers, for the 3rd time without a break. The run can be resumed"
    with pytest.raises(QuorumError, match=line):
        result_of(iterative(run, base=Base(Silent(2, 3, 4)), rounds=5), {1: stock(1), 2: stock(2)})
    found = result_of(iterative(run, base=Base(Silent()), rounds=5), {1: stock(1), 2: stock(2)})
    assert [row["epoch"] for row in rows_of(run)] == [1, 2, 3, 4, 5]
    assert equal(found, result_of(iterative(tmp_path / "clean", rounds=5), {1: stock(1), 2: stock(2)}))


def test_rounds_without_a_model_that_do_not_follow_each_other_end_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result_of(iterative(run, base=Base(Silent(1, 2, 4, 5)), rounds=6), {1: stock(1), 2: stock(2)})
    assert [row["answers"] for row in rows_of(run)] == [2] * 6


@pytest.mark.parametrize("names", list(permutations(("accuracy", "train-accuracy", "train-train-accuracy"))))
def test_numbers_of_clients_with_a_taken_name_keep_their_values(names: tuple[str, ...]) -> None:
    values = {"accuracy": 0.1, "train-accuracy": 0.2, "train-train-accuracy": 0.3}
    assert in_row({name: values[name] for name in names}) == {
        "train-accuracy": 0.2,
        "train-train-accuracy": 0.3,
        "train-train-train-accuracy": 0.1,
    }
    assert in_row({"accuracy": 0.1, "loss": 2.0}) == {"train-accuracy": 0.1, "loss": 2.0}
