"""The form of a round's answers: one client's records, whatever they are called, cost no other client the round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import Client, equal, spoilt, stock, weights
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from test_iterative import iterative, refusals_of, result_of, rows_of, trainer

from strategies.core.errors import QuorumError, UploadError
from strategies.flower.messages import Reply
from strategies.flower.rounds.answers import CheckedAnswer, decode_record, drop_incomplete, show_to_strategy, to_record
from strategies.flower.rounds.base import EVERYONE, Base

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


def four(place: Path, change: Change | None = None) -> dict[int, Client]:
    """Four clients, of whom the last may answer in another form."""
    clients = {k: trainer(f"c{k}", 1, place=place, examples=8 + k) for k in range(1, 5)}
    return clients if change is None else {**clients, 4: spoilt(clients[4], change)}


@cache
def clean(name: str) -> dict[str, torch.Tensor]:
    """Return the model of four clients in its own form."""
    with TemporaryDirectory() as place:
        return result_of(iterative(Path(place) / "run", strategy=name, rounds=2), four(Path(place) / "disk"))


# SCAFFOLD has every kind of record; the others have fewer, of other forms.
@pytest.mark.parametrize(
    ("name", "change"),
    [*(("scaffold", change) for change in CHANGES), ("fedavg", two_metrics), ("stc", surplus), ("stc", renamed_arrays)],
)
def test_answer_in_another_form_counts_or_is_refused_alone(tmp_path: Path, name: str, change: Change) -> None:
    found = result_of(iterative(tmp_path / "run", strategy=name, rounds=2), four(tmp_path / "disk", change))
    answers = [row["answers"] for row in rows_of(tmp_path / "run")]
    if answers == [4, 4]:
        assert equal(found, clean(name))
        return
    assert answers == [3, 3]
    assert {client for client, _ in refusals_of(tmp_path / "run")} <= {"node-4", "c4"}
    assert not torch.equal(found["0.weight"], weights(5)["0.weight"])


def numbers(client: str, **values: Any) -> CheckedAnswer:
    """An answer whose model is one array, with some numbers."""
    content = {"arrays": ArrayRecord({"w": torch.zeros(2)}), "metrics": MetricRecord({"num-examples": 5, **values})}
    message = Message(RecordDict(), reply_to=Message(RecordDict(), dst_node_id=1, message_type="train"))
    facts: Any = None
    return CheckedAnswer(client, message, RecordDict(content), Reply(facts, {"w": torch.ones(2)}))


def own_average(contents: list[RecordDict], weight: str) -> MetricRecord:
    """A project's own average, which reads a number by its name."""
    del weight
    return MetricRecord({"loss": sum(float(content["metrics"]["loss"]) for content in contents) / len(contents)})  # type: ignore[arg-type, index]


def with_loss(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({**content.metric_records["metrics"], "loss": 0.5})


def test_client_without_a_number_that_a_project_s_own_average_reads_costs_its_answer_alone(tmp_path: Path) -> None:
    clients = {k: spoilt(stock(k), with_loss) for k in (1, 2, 3)}
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


@pytest.mark.parametrize("hostile", [{"loss": float("nan")}, {"loss": float("inf")}, {"loss": [1.0]}, {}])
def test_a_client_that_tells_no_finite_number_leaves_the_average_to_the_others(hostile: dict[str, Any]) -> None:
    answers = [numbers("a", loss=1.0), numbers("b", loss=2.0), numbers("c", **hostile)]
    strategy = FedAvg(**EVERYONE)

    _, told = strategy.aggregate_train(1, show_to_strategy(strategy, answers, ["w"]))

    assert told == {"loss": pytest.approx(1.5)}
    complete, _ = drop_incomplete(FedAvg(train_metrics_aggr_fn=own_average), answers)
    assert [each.client for each in complete] == ["a", "b"]


@pytest.mark.parametrize("form", ["module.layers.{}", "_orig_mod.layers.{}", "layers._orig_mod.{}", "model.layers.{}"])
def test_a_record_beside_the_model_has_the_usual_names_too(form: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"layers.w": np.zeros((2, 3), np.float32), "layers.b": np.zeros(3, np.float32)}
    values = {name: np.full_like(value, k) for k, (name, value) in enumerate(wanted.items(), start=1)}
    wrapped = {form.format(name.removeprefix("layers.")): value for name, value in values.items()}

    with caplog.at_level("INFO", "flwr"):
        found = decode_record(RecordDict({"control": to_record(wrapped)}), "control", wanted)

    assert list(found) == list(wanted)
    assert all(np.array_equal(found[name], values[name]) for name in wanted)
    assert ["control" in line and "names were taken without" in line for line in caplog.messages] == [True]
    with pytest.raises(UploadError, match="other"):
        decode_record(RecordDict({"control": to_record({**wrapped, "other": values["layers.b"]})}), "control", wanted)
