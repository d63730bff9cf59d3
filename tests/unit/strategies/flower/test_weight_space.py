"""Merges in weight space as Flower's strategies: no classes, no shapes, one start for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flower_fakes import ONE_THREAD, Client, FakeGrid, equal, net, records, stock, weights
from flwr.app import ArrayRecord, Message

from strategies import DARE, TIES, TSV, FedENS, OneShotFedAvg, TaskArithmetic, merge
from strategies.client import upload_facts
from strategies.core.errors import OptionError, QuorumError
from strategies.flower.one_shot import OneShot

START = weights(5)


def built(kind: type[OneShot], folder: Path, **more: Any) -> OneShot:
    return kind(net, run_dir=folder, options=ONE_THREAD, compute="in-process", **more)  # type: ignore[call-arg]


def saying(name: str, seed: int, start: Any) -> Client:
    """A client that says where its training started; None: from what the server sent."""

    def answer(message: Message) -> Message:
        began = message.content.array_records["arrays"] if start is None else start
        facts = upload_facts(client=name, start=began)
        return Message(records(weights(seed), facts=facts), reply_to=message)

    return answer


@pytest.mark.parametrize(
    ("kind", "method"),
    [(OneShotFedAvg, "fedavg"), (TaskArithmetic, "task-arithmetic"), (TIES, "ties"), (DARE, "dare"), (TSV, "tsv")],
)
def test_stock_clients_are_merged_as_merge_does_and_replayed(kind: type[OneShot], method: str, tmp_path: Path) -> None:
    grid = FakeGrid({1: stock(1), 2: stock(2)})
    found = built(kind, tmp_path / "run")
    result = found.start(grid, ArrayRecord(START))
    states = {upload.client: upload.read() for upload in found.report.job.uploads}
    same = merge(states, method, start=START, num_examples=[10, 10], log=str).outcome.student
    student = dict(result.arrays.to_torch_state_dict())
    assert equal(student, same)
    assert not equal(student, START)
    again = built(kind, tmp_path / "other").replay(tmp_path / "run", target=tmp_path / "replay")
    assert equal(dict(again.state_dict()), student)


def test_a_client_from_another_start_is_refused_and_costs_nothing_else(tmp_path: Path) -> None:
    nodes = {1: saying("a", 1, None), 2: saying("b", 2, START), 3: saying("c", 3, weights(6))}
    found = built(TIES, tmp_path / "run")
    found.start(FakeGrid(nodes), ArrayRecord(START))
    assert [upload.client for upload in found.report.job.uploads] == ["a", "b"]
    refused = (tmp_path / "run" / "refusals.jsonl").read_text()
    assert "its training started from weights with sha256" in refused
    with pytest.raises(QuorumError, match="must start from the weights that the server sends"):
        built(TIES, tmp_path / "few").start(FakeGrid({1: nodes[1], 3: nodes[3]}), ArrayRecord(START))


def test_without_a_known_start_there_is_no_merge_of_updates(tmp_path: Path) -> None:
    grid = FakeGrid({1: stock(1), 2: stock(2)})
    with pytest.raises(OptionError, match="did not start from the weights of this run.*initial_arrays"):
        built(TIES, tmp_path / "run").start(grid)


def test_a_resumed_run_begins_with_the_same_arrays(tmp_path: Path) -> None:
    with pytest.raises(QuorumError):
        built(TIES, tmp_path / "run").start(FakeGrid({1: stock(1)}), ArrayRecord(START), timeout=0)
    with pytest.raises(OptionError, match="initial_arrays have sha256 .* resume with the same arrays"):
        built(TIES, tmp_path / "run").start(FakeGrid({1: stock(1), 2: stock(2)}), ArrayRecord(weights(6)))


def test_a_strategy_of_classifiers_needs_classes_and_shapes() -> None:
    with pytest.raises(OptionError, match="'fedens' needs num_classes and input_shape"):
        FedENS(net)
    with pytest.raises(OptionError, match="num_classes is missing: give num_classes and input_shape, or neither"):
        TIES(net, input_shape=(1, 8, 8))
