"""Questions after the upload, over Flower's grid: recipients, waiting, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_fakes import Client, DeployedGrid, FakeGrid, answering, in_turn
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from strategies.core.clients import Answer, Question
from strategies.core.errors import UploadError
from strategies.flower.clients import GridClients
from strategies.flower.nodes import Nodes, Refusals
from strategies.run.run_folder import RunFolder
from strategies.run.traffic import Traffic

QUESTION = Question("fens", {"step": "round", "round": 1}, {"weight": np.ones(3, np.float32)})


def replies(name: Any, *, arrays: dict[str, Any] | None = None, **facts: Any) -> Client:
    record = ArrayRecord({key: Array(np.asarray(value)) for key, value in (arrays or {}).items()})
    return answering(RecordDict({"answer": ConfigRecord({"client": name, **facts}), "arrays": record}))


@pytest.fixture
def talk(tmp_path: Path) -> Callable[..., GridClients]:
    folder = RunFolder.create(tmp_path / "run", {})

    def made(grid: FakeGrid, *, timeout: float = 100.0, **more: Any) -> GridClients:
        found = GridClients(
            Nodes(grid, Refusals(folder.round(1)), Traffic(), max_bytes=1000),  # type: ignore[arg-type]
            common={"run-id": "f00", "seed": 5},
            timeout=timeout,
            **more,
        )
        found.folder = folder.round(1)  # type: ignore[attr-defined]
        return found

    return made


def refusals(clients: Any) -> list[tuple[str, str]]:
    return [(row["client"], row["reason"]) for row in clients.folder.refused()]


def test_a_question_to_all_reaches_every_node_and_answers_come_in_the_order_of_names(talk: Any) -> None:
    bob = replies("bob", arrays={"weight": np.ones(1, np.float32)})
    grid = FakeGrid({1: bob, 2: replies("alice", round=1)})

    answers = talk(grid).ask(QUESTION, phase="aggregator", quorum=2)

    assert list(answers) == ["alice", "bob"]
    assert answers["alice"].facts == {"round": 1}
    assert grid.of_type("train.fens") == [1, 2]
    config = grid.asked[0].content.config_records["config"]
    assert dict(config) == {"run-id": "f00", "seed": 5, "step": "round", "round": 1}


def test_named_questions_reach_the_named_alone_once_their_names_are_known(talk: Any) -> None:
    grid = FakeGrid({1: replies("alice"), 2: replies("bob")})
    clients = talk(grid)
    clients.ask(QUESTION, phase="p")

    answers = clients.ask({"bob": Question("fens", {"step": "x"}), "absent": QUESTION}, phase="p")

    assert list(answers) == ["bob"]
    assert [m.metadata.dst_node_id for m in grid.asked] == [1, 2, 2]


def test_a_late_client_is_not_waited_for_beyond_the_patience_and_is_asked_again_when_it_is_free(talk: Any) -> None:
    grid = FakeGrid({1: replies("alice"), 2: replies("bob")}, delays={2: 1500})
    clients = talk(grid)

    first = clients.ask(QUESTION, phase="p", quorum=1, patience_s=3.0)
    assert list(first) == ["alice"]
    clients.ask(QUESTION, phase="p", quorum=1, patience_s=1.0)
    assert [m.metadata.dst_node_id for m in grid.asked] == [1, 2, 1]  # it is busy with its first question
    grid._delays[2] = 0
    clients.ask(QUESTION, phase="p", quorum=1, patience_s=1.0)
    assert [m.metadata.dst_node_id for m in grid.asked] == [1, 2, 1, 1, 2]


def test_a_lost_node_is_not_waited_for_beyond_the_patience_and_counts_again_under_another_id(talk: Any) -> None:
    grid = DeployedGrid({1: replies("alice"), 2: replies("bob"), 3: replies("bob")}, away={3: (0, 10**9)})
    clients = talk(grid)

    def answered() -> list[str]:
        return list(clients.ask(QUESTION, phase="p", quorum=1, patience_s=15.0))

    assert answered() == ["alice", "bob"]
    grid.away = {2: (0, 10**9), 3: (0, 10**9)}  # bob's machine is gone
    assert answered() == ["alice"]
    assert answered() == ["alice"]
    grid.away = {2: (0, 10**9)}  # and back, behind a new node
    assert answered() == ["alice", "bob"]
    assert refusals(clients) == []


def test_a_client_that_says_it_cannot_is_left_out_and_its_reason_is_kept(talk: Any) -> None:
    grid = FakeGrid({1: replies("alice"), 2: replies("bob", error="it holds no examples")})
    clients = talk(grid)
    clients.ask(QUESTION, phase="p")
    clients.ask(QUESTION, phase="p")

    assert refusals(clients) == [("bob", "it holds no examples")]
    assert grid.of_type("train.fens") == [1, 2, 1]


def refuse_round_7(answer: Answer) -> None:
    if answer.facts.get("round") == 7:
        raise UploadError("weight holds NaN", answer.client)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (replies("bob", round=7), "weight holds NaN"),  # by the question's own check
        (replies("../bob"), "answer.client is '../bob': must be a name that matches"),
        (replies(7), "answer.client is 7: must be a name that matches"),
        (replies("bob", arrays={"w": np.zeros(500, np.float32)}), "its answer is larger than"),
        (replies("bob", arrays={"w": np.zeros(3, np.float64)}), "arrays['w'] is 'float64': must be float32 or int64"),
        (replies("alice"), "two nodes answer under this name, the second is refused"),
    ],
)
def test_an_answer_of_a_wrong_form_is_refused_and_the_others_count(talk: Any, node: Client, reason: str) -> None:
    clients = talk(FakeGrid({1: replies("alice"), 2: node}))

    assert list(clients.ask(QUESTION, phase="p", quorum=1, check=refuse_round_7)) == ["alice"]
    ((_, found),) = refusals(clients)
    assert reason in found


def taking_names(client: GridClients, rounds: int) -> list[list[str]]:
    return [list(client.ask(QUESTION, phase="p", quorum=1)) for _ in range(rounds)]


def test_a_node_that_takes_another_s_name_is_refused_and_the_other_answers_on(talk: Any) -> None:
    mallory = in_turn(replies("mallory"), replies("bob"), replies("bob", error="leave me out"))
    clients = talk(FakeGrid({1: replies("bob"), 2: mallory}))

    assert taking_names(clients, 4) == [["bob", "mallory"], ["bob"], ["bob"], ["bob"]]
    assert {name for name, _ in refusals(clients)} == {"mallory"}
    assert "it answers as 'bob' and was 'mallory' before: must keep its name" in refusals(clients)[0][1]


def test_only_clients_that_have_uploaded_are_heard(talk: Any) -> None:
    clients = talk(FakeGrid({1: replies("bob"), 2: replies("eve")}), members=("alice", "bob"))

    assert taking_names(clients, 2) == [["bob"], ["bob"]]
    assert refusals(clients) == [("node-2", "it answers as 'eve', and no upload has this name: must have uploaded")]
