"""The conversation with the nodes: questions, repeated questions, accepted answers, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flower_fakes import DeployedGrid, FakeGrid, Hostile, crashing, failing, stock
from flwr.app import Message, RecordDict

from strategies.core.errors import StoreError, UploadError
from strategies.flower.asking import PULLS_PER_POLL, Exchange
from strategies.flower.nodes import Nodes, Refusals, SentQuestion, cause_of_failure
from strategies.run.run_folder import RunFolder
from strategies.run.traffic import Traffic


class Talk:
    """The nodes of a grid, and the refusals that are noted."""

    def __init__(self, grid: FakeGrid, folder: Any) -> None:
        self.grid, self.folder = grid, folder
        self.nodes = Nodes(grid, Refusals(folder), Traffic())  # type: ignore[arg-type]

    @property
    def asked(self) -> list[int]:
        return [message.metadata.dst_node_id for message in self.grid.asked]

    @property
    def refusals(self) -> list[tuple[str, str]]:
        return [(row["client"], row["reason"]) for row in self.folder.refused()]

    def exchange(self, receive: Any = None, **more: Any) -> tuple[Exchange, list[int]]:
        """A question to every node that owes no answer, and the nodes that have answered."""
        heard: list[int] = []
        busy = self.nodes.busy()

        def question(node: int) -> Message | None:
            return None if node in busy else Message(RecordDict(), dst_node_id=node, message_type="train")

        receive = receive or (lambda reply, sent: not heard.append(sent.node))
        return Exchange(self.nodes, "test", **{"question": question, "receive": receive, **more}), heard

    def ask(self, receive: Any = None, timeout_s: float = 60.0, **more: Any) -> list[int]:
        """Ask, wait until no answer is outstanding, and leave the others."""
        exchange, heard = self.exchange(receive, **more)
        exchange.wait(timeout_s, lambda: not exchange.waiting_for, lambda: "")
        exchange.close(own)
        return sorted(heard)


def own(reply: Message, sent: SentQuestion) -> None:
    if reply.has_error():
        raise UploadError(cause_of_failure(reply))


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Callable[[FakeGrid], Talk]]:
    with RunFolder.create(tmp_path / "run", {}) as run:
        yield lambda grid: Talk(grid, run.round(1))


def test_every_node_is_asked_once_and_answers_are_pulled_one_at_a_time(talk: Any) -> None:
    found = talk(FakeGrid({2: stock(2), 1: stock(1)}, delays={1: 3}))
    assert found.ask() == [1, 2]
    assert found.asked == [1, 2]
    assert all(len(ids) == 1 for ids in found.grid.pulls)
    assert [ids[0] for ids in found.grid.pulls].count("message-1") == 1  # an answer is pulled only once


def test_real_nodes_that_train_for_an_hour_are_asked_once_a_second_and_the_quick_ones_at_once(
    talk: Any, clock: Any
) -> None:
    found = talk(DeployedGrid({1: stock(1), 2: lambda message: None}, delays={1: 3}))
    heard: list[float] = []
    found.ask(lambda reply, sent: not heard.append(clock.now), timeout_s=3600.0)
    assert heard == [pytest.approx(0.8)]
    assert 3600 <= len(found.grid.pulls) <= 3700


def test_real_nodes_that_are_looked_at_in_turn_are_asked_as_often_as_at_first(talk: Any, clock: Any) -> None:
    silent: dict[int, Any] = dict.fromkeys(range(1, 20), lambda message: None)
    found = talk(DeployedGrid(silent))
    found.ask(timeout_s=100.0)
    assert len(found.grid.pulls) / PULLS_PER_POLL == pytest.approx(500, abs=3)


# Answers that cannot be read.


@pytest.mark.parametrize("error", [KeyError("chunk"), MemoryError(), RecursionError("deep"), ValueError("a\x1b[31mb")])
def test_an_answer_that_cannot_be_inflated_is_a_refusal_of_its_node_alone(talk: Any, error: Exception) -> None:
    found = talk(Hostile({1: stock(1), 2: stock(2), 3: stock(3)}, hostile=[2], error=error))
    assert found.ask() == [1, 3]
    assert found.ask() == [1, 3]
    ((client, reason),) = found.refusals
    assert (client, reason.split(": ")[:2]) == ("node-2", ["its answer cannot be read", type(error).__name__])
    assert "\x1b" not in reason
    assert found.asked.count(2) == 1  # it is asked nothing any more


def forged(message: Message) -> Message:
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__.update({"_src_node_id": 1, "_reply_to_message_id": "message-0"})
    return reply


@pytest.mark.parametrize("late", [False, True])
def test_an_answer_bears_the_node_that_was_asked_whatever_it_says_of_itself(talk: Any, late: bool) -> None:
    found = talk(FakeGrid({2: forged}, delays={1: 10**9 * late}))
    heard: list[tuple[int, int]] = []

    def receive(reply: Message, sent: SentQuestion) -> bool:
        heard.append((reply.metadata.src_node_id, sent.node))
        return True

    exchange, _ = found.exchange(receive)
    exchange.wait(5.0, lambda: not exchange.waiting_for, lambda: "")
    exchange.close(receive)
    found.grid._delays[1] = 0
    assert found.nodes.busy() == set()
    assert heard == [(2, 2)]


# Late answers.


def test_a_node_that_owes_an_answer_is_asked_nothing_else_until_it_has_come(talk: Any) -> None:
    found = talk(DeployedGrid({1: stock(1), 2: stock(2)}, delays={2: 10**9}))
    assert found.ask(timeout_s=5.0) == [1]
    assert found.ask(timeout_s=5.0) == [1]
    assert (found.asked, found.nodes.busy()) == ([1, 2, 1], {2})
    found.grid._delays[2] = 0
    assert found.ask(timeout_s=5.0) == [1, 2]
    assert found.asked == [1, 2, 1, 1, 2]


@pytest.mark.parametrize(("client", "lines"), [(failing("no data"), ["late: node-1: no data"]), (crashing, [])])
def test_a_late_failure_of_the_client_is_logged_and_a_lost_answer_is_no_failure(
    talk: Any, said: list[str], client: Any, lines: list[str]
) -> None:
    found = talk(DeployedGrid({1: client}, delays={1: 10**9}))
    found.ask(timeout_s=5.0)
    found.grid._delays[1] = 0
    assert found.nodes.busy() == set()
    assert ([line for line in said if line.startswith("late")], found.refusals) == (lines, [])


# Contents, refusals, names.


def test_a_disk_error_of_the_server_ends_the_wait_and_blames_no_client(talk: Any) -> None:
    def receive(reply: Message, sent: SentQuestion) -> bool:
        raise StoreError("the folder is gone")

    found = talk(FakeGrid({1: stock(1)}))
    exchange, _ = found.exchange(receive)
    with pytest.raises(StoreError, match="the folder is gone"):
        exchange.wait(1.0, lambda: False, lambda: "")
    assert (exchange.waiting_for, found.refusals) == ((), [])


def test_a_late_answer_that_cannot_be_inflated_is_heard_of_once_and_its_node_asked_no_more(
    talk: Any, said: list[str]
) -> None:
    grid = Hostile({1: stock(1), 2: stock(2)}, hostile=[], error=KeyError("chunk"), delays={2: 10**9})
    found = talk(grid)
    assert found.ask(timeout_s=5.0) == [1]
    grid.hostile = {2}
    assert found.ask(timeout_s=5.0) == [1]
    assert found.asked == [1, 2, 1]
    assert said.count("late: node-2: its answer cannot be read: KeyError: 'chunk'") == 1
