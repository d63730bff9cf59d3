"""Flower's abstract steps, for a caller that owns the loop; and the client half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flower_fakes import GRID, FakeGrid, dense, equal, failing, named, strategy, weights
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from strategies import OneShot, OneShotFedAvg
from strategies.client import already_held, held_digest
from strategies.core.errors import QuorumError

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


def test_configure_train_asks_every_node_and_names_held_uploads(tmp_path: Path) -> None:
    work: list[str] = []
    alice, bob = named("alice", 1, work=work), named("bob", 2, work=work)
    found = strategy(OneShotFedAvg, tmp_path / "run")
    with pytest.raises(QuorumError, match="node-2: ValueError"):
        one_round(found, FakeGrid({1: alice, 2: failing("ValueError")}))
    grid = FakeGrid({2: bob, 1: alice})
    one_round(found, grid)
    assert grid.of_type() == [1, 2]
    assert grid.asked[0].content["config"]["lr"] == 0.1
    assert grid.asked[0].content["config"]["held"] == [held_digest("alice", grid.asked[0].content["config"]["run-id"])]
    assert work == ["alice", "bob"]
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


def question(held: Any = None) -> Message:
    config = ConfigRecord() if held is None else ConfigRecord({"held": held})
    return Message(RecordDict({"config": config}), dst_node_id=7, message_type="train")


def test_already_held_when_the_client_is_named_answers_at_once() -> None:
    answer = already_held(question([held_digest("bob", ""), held_digest("alice", "")]), client="alice")
    assert answer.content == RecordDict({"upload": ConfigRecord({"client": "alice", "held": True})})
