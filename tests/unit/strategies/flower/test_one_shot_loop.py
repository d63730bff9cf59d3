"""Flower's abstract steps, for a caller that owns the loop; and the client half."""

from __future__ import annotations

from pathlib import Path

from flower_fakes import GRID, FakeGrid, dense, equal, failing, strategy, weights
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from strategies import OneShot, OneShotFedAvg

START = ArrayRecord(weights(5))


def one_round(found: OneShot, grid: FakeGrid, server_round: int = 1) -> tuple[ArrayRecord | None, MetricRecord | None]:
    messages = found.configure_train(server_round, START, ConfigRecord({"lr": 0.1}), grid)  # type: ignore[arg-type]
    return found.aggregate_train(server_round, grid.send_and_receive(messages, timeout=5.0))


def test_aggregate_train_ends_with_the_bits_of_start(tmp_path: Path) -> None:
    whole = dense(tmp_path / "whole").start(FakeGrid(GRID), START).arrays
    found = dense(tmp_path / "run")
    arrays, metrics = one_round(found, FakeGrid(GRID))
    assert metrics is None
    assert equal(dict(arrays.to_torch_state_dict()), dict(whole.to_torch_state_dict()))
    found.close()


def test_evaluate_steps_ask_a_share_of_the_nodes_and_average(tmp_path: Path) -> None:
    grid = FakeGrid(dict.fromkeys(range(1, 5), failing("")))
    found = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=0.5)
    messages = list(found.configure_evaluate(1, START, ConfigRecord(), grid))  # type: ignore[arg-type]
    assert len(messages) == 2
    assert {m.metadata.message_type for m in messages} == {MessageType.EVALUATE}

    def scores(message: Message, accuracy: float, examples: int) -> Message:
        metrics = MetricRecord({"accuracy": accuracy, "num-examples": examples})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    replies = [scores(messages[0], 1.0, 1), scores(messages[1], 0.0, 3)]
    assert found.aggregate_evaluate(1, replies) == {"accuracy": 0.25}
