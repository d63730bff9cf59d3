"""Nodes whose plug is pulled while they are asked: who is asked again, who is waited for, what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flower_fakes import CLASSES, SIGNATURES, FakeGrid, equal, failing, named, silent, stock, weights
from flwr.app import ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode

from strategies.core.errors import QuorumError
from strategies.flower.asking import MOST_QUESTIONS, PULLS_PER_POLL, Exchange
from strategies.flower.collect import Collector
from strategies.flower.messages import Request
from strategies.flower.names import Names
from strategies.flower.nodes import Nodes, Refusals
from strategies.run.run_folder import RoundFolder, RunFolder
from strategies.run.traffic import Traffic

REQUEST = Request(ArrayRecord(), {}, 1, "f00", 5)
SUPERLINK = 1


class DeployedGrid(FakeGrid):
    """A grid whose SuperLink knows when a node is away, and answers in its place.

    Args:
        nodes: Node id -> client.
        away: Node id -> (first, last) listing in which it is not connected.
        activated: Node id -> listing with which its SuperNode starts anew.
    """

    def __init__(
        self,
        nodes: dict[int, Any],
        *,
        away: dict[int, tuple[int, int]] | None = None,
        activated: dict[int, int] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(nodes, simulation=False, **more)
        self.away, self.activated = away or {}, activated or {}

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=node, last_activated_at=str(self._listings >= self.activated.get(node, 10**9)))
            for node in self.get_node_ids()
            if not self._is_away(node)
        ]

    def pull_messages(self, message_ids: Any) -> list[Message]:
        ids = list(message_ids)
        asked = {m.metadata.message_id: m for m in self.asked}
        lost = [i for i in ids if self._is_away(asked[i].metadata.dst_node_id)]
        return [unavailable(asked[i]) for i in lost] + super().pull_messages([i for i in ids if i not in lost])

    def _is_away(self, node: int) -> bool:
        first, last = self.away.get(node, (10**9, 0))
        return first <= self._listings <= last


def unavailable(message: Message, code: int = ErrorCode.NODE_UNAVAILABLE) -> Message:
    """What the SuperLink says in a node's place: under its own id."""
    reply = Message(Error(code=code, reason="Error: Node Unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
    return reply


def in_turn(*clients: Any) -> Callable[[Message], Message | None]:
    """A client that answers every question in another way, the last way from then on."""
    left = list(clients)
    return lambda message: (left.pop(0) if len(left) > 1 else left[0])(message)


def crashing(message: Message) -> Message:
    return unavailable(message, ErrorCode.CLIENT_APP_CRASHED)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RoundFolder]:
    with RunFolder.create(tmp_path / "run", {}) as run:
        yield run.round(1)


def collector(folder: RoundFolder, names: Names | None = None) -> Collector:
    return Collector(folder, SIGNATURES, num_classes=CLASSES, max_bytes=10**6, names=names)


def reasons(folder: RoundFolder) -> dict[str, str]:
    return {row["client"]: row["reason"] for row in folder.refused()}


def test_collect_when_a_client_app_dies_asks_the_node_again(folder: RoundFolder, said: list[str]) -> None:
    grid = DeployedGrid({1: in_turn(crashing, named("alice", 1)), 2: named("bob", 2)})
    collector(folder).collect(grid, REQUEST, timeout=60.0, min_uploads=2)
    assert grid.of_type() == [1, 2, 1]
    assert folder.held() == ["alice", "bob"]
    assert folder.refused() == []
    assert (
        "node-1: the process of its ClientApp ended without an answer; it is asked again when it is connected" in said
    )


def test_collect_when_the_last_client_app_dies_asks_its_node_again_though_the_quorum_is_met(
    folder: RoundFolder,
) -> None:
    nodes = {1: in_turn(crashing, named("alice", 1)), 2: named("bob", 2), 3: named("carl", 3)}
    collector(folder).collect(DeployedGrid(nodes, delays={1: 60}), REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob", "carl"]
    assert folder.refused() == []


def test_collect_when_a_super_node_that_has_answered_starts_anew_takes_its_answer(folder: RoundFolder) -> None:
    last, work = 2 * PULLS_PER_POLL, list[int]()
    grid = DeployedGrid({n: stock(n, work=work) for n in range(1, last + 1)}, activated={last: 2})
    collector(folder).collect(grid, REQUEST, timeout=60.0, min_uploads=last)
    assert sorted(work) == list(range(1, last + 1))  # nobody trained twice
    assert len(folder.held()) == last


def test_collect_when_a_client_app_dies_each_time_gives_it_up(folder: RoundFolder, clock: Any) -> None:
    grid = DeployedGrid({1: crashing, 2: named("bob", 2)})
    with pytest.raises(QuorumError, match=r"node-1: the process of its ClientApp ended without an answer, 3 times\. "):
        collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert grid.of_type().count(1) == MOST_QUESTIONS
    assert clock.now < 10.0  # nothing is left to wait for


@pytest.mark.parametrize("code", [ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION])
def test_collect_when_a_client_itself_fails_does_not_ask_it_again(folder: RoundFolder, code: int) -> None:
    own = lambda message: Message(Error(code=code, reason="no data"), reply_to=message)  # noqa: E731
    grid = DeployedGrid({1: own, 2: named("bob", 2)})
    collector(folder).collect(grid, REQUEST, timeout=60.0, min_uploads=1)
    assert grid.of_type() == [1, 2]
    assert reasons(folder) == {"node-1": "no data"}


def test_collect_when_a_node_goes_and_comes_back_under_its_id_asks_it_again(folder: RoundFolder) -> None:
    grid = DeployedGrid({1: in_turn(silent, named("alice", 1)), 2: named("bob", 2)}, away={1: (20, 300)})
    collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert grid.of_type() == [1, 2, 1]
    assert folder.held() == ["alice", "bob"]
    assert folder.refused() == []


def test_collect_when_a_node_comes_back_under_another_id_does_not_wait_for_the_old_one(
    folder: RoundFolder, clock: Any
) -> None:
    grid = DeployedGrid({1: silent, 2: named("alice", 1), 3: named("bob", 2)}, joins={2: 100}, away={1: (200, 10**9)})
    collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]
    assert clock.now < 60.0
    assert reasons(folder) == {"node-1": "the connection to the node was lost, and it has not come back"}


def test_collect_when_the_old_ids_name_is_known_finishes_with_the_names_answer(folder: RoundFolder, clock: Any) -> None:
    grid = DeployedGrid({1: silent, 2: named("alice", 1), 3: named("bob", 2)}, joins={2: 10})
    names = Names()
    names.learn(1, "alice")
    collector(folder, names=names).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert clock.now < 10.0
    assert folder.held() == ["alice", "bob"]
    assert folder.refused() == []


def test_collect_when_a_super_node_starts_anew_under_its_id_does_not_wait_for_what_it_forgot(
    folder: RoundFolder, clock: Any, said: list[str]
) -> None:
    grid = DeployedGrid({1: in_turn(silent, named("alice", 1)), 2: named("bob", 2)}, activated={1: 30})
    collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]
    assert clock.now < 20.0
    assert "node-1: its SuperNode was restarted; it is asked again when it is connected" in said


def test_collect_when_lost_nodes_leave_the_quorum_open_waits_for_them_to_the_deadline(
    folder: RoundFolder, clock: Any
) -> None:
    grid = DeployedGrid({1: silent, 2: named("bob", 2)}, away={1: (20, 10**9)})
    with pytest.raises(QuorumError, match="node-1: the connection to the node was lost, and it has not come back"):
        collector(folder).collect(grid, REQUEST, timeout=300.0, min_uploads=2)
    assert clock.now == pytest.approx(300.0)


def test_collect_when_lost_nodes_are_not_needed_goes_on_without_them(folder: RoundFolder, clock: Any) -> None:
    grid = DeployedGrid({1: silent, 2: named("bob", 2)}, away={1: (20, 10**9)})
    collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=1)
    assert clock.now < 10.0


def test_collect_when_one_client_is_two_nodes_still_waits_for_the_quorum_of_clients(folder: RoundFolder) -> None:
    nodes = {1: named("alice", 1), 2: named("alice", 1), 3: named("bob", 2)}
    collector(folder).collect(DeployedGrid(nodes, joins={3: 100}), REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]


def test_collect_when_one_clients_second_upload_is_refused_still_waits_for_the_quorum_of_clients(
    folder: RoundFolder,
) -> None:
    nodes = {1: named("alice", 1), 2: named("alice", 2), 3: named("bob", 3)}
    collector(folder).collect(DeployedGrid(nodes, joins={3: 100}), REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]


def test_collect_when_the_same_upload_comes_twice_takes_it_once_and_refuses_nothing(
    folder: RoundFolder, said: list[str]
) -> None:
    # Both are asked before either has answered: what the client keeps on its disk is sent again.
    collector(folder).collect(
        DeployedGrid({1: named("alice", 1), 2: named("alice", 1)}), REQUEST, timeout=60.0, min_uploads=1
    )
    assert folder.held() == ["alice"]
    assert folder.refused() == []
    assert "upload of alice: it came again, unchanged" in said


def test_collect_when_the_deadline_comes_takes_what_is_there_by_then(folder: RoundFolder) -> None:
    many = {n: named(f"client-{n:03d}", n) for n in range(1, 3 * PULLS_PER_POLL)}
    phase = collector(folder)
    phase.collect(DeployedGrid(many), REQUEST, timeout=0.0, min_uploads=len(many))
    assert len(folder.held()) == len(many)


@pytest.mark.parametrize(
    ("close", "fate"),
    [
        (False, "stored: it came after the deadline, but before the server stage"),
        (True, "came late: kept for replay, not part of this result"),
    ],
)
def test_collect_when_an_upload_is_late_counts_it_until_the_server_stage_begins(
    folder: RoundFolder, said: list[str], close: bool, fate: str
) -> None:
    phase, grid = collector(folder), DeployedGrid({1: named("alice", 1), 2: named("bob", 2)}, delays={2: 10**9})
    found = phase.collect(grid, REQUEST, timeout=30.0, min_uploads=1)
    if close:
        phase.close()
    grid._delays[2] = 0
    found.poll()
    assert folder.held() == ["alice", "bob"]
    assert any(line.startswith("upload of bob") and line.endswith(fate) for line in said)


def test_collect_when_a_late_node_is_lost_says_so_and_asks_nobody(folder: RoundFolder) -> None:
    grid = DeployedGrid({1: named("alice", 1), 2: silent})
    found = collector(folder).collect(grid, REQUEST, timeout=30.0, min_uploads=1)
    grid.away[2] = (0, 10**9)
    found.poll()
    assert grid.of_type() == [1, 2]
    assert folder.refused()[-1]["reason"] == "the connection to the node was lost"


def test_exchange_polls_many_nodes_in_turns(folder: RoundFolder) -> None:
    many, heard = 5 * PULLS_PER_POLL, list[int]()
    grid = DeployedGrid({n: stock(n) for n in range(many)}, delays=dict.fromkeys(range(many), 2))
    found = Exchange(
        Nodes(grid, Refusals(folder), Traffic()),  # type: ignore[arg-type]
        "upload",
        question=REQUEST.message,
        receive=lambda reply, sent: not heard.append(sent.node),
    )
    found.look()
    for _ in range(2):
        before = len(grid.pulls)
        found.poll()
        assert len(grid.pulls) - before == PULLS_PER_POLL
    assert {ids[0] for ids in grid.pulls} == {f"message-{n}" for n in range(2 * PULLS_PER_POLL)}
    for _ in range(13):
        found.poll()
    assert sorted(heard) == list(range(many))
    assert all(len(ids) == 1 for ids in grid.pulls)  # one upload in memory at a time


def test_collect_in_a_simulation_does_not_ask_a_failed_node_for_ever(folder: RoundFolder, clock: Any) -> None:
    with pytest.raises(QuorumError):
        collector(folder).collect(FakeGrid({1: failing("ActorDiedError")}), REQUEST, timeout=3600.0, min_uploads=1)
    assert clock.now < 10.0


def test_an_accepted_upload_is_never_replaced_by_another_of_its_name(folder: RoundFolder) -> None:
    grid = DeployedGrid({1: named("alice", 1), 2: named("alice", 2)})
    collector(folder).collect(grid, REQUEST, timeout=60.0, min_uploads=1)
    assert equal(folder.uploads()[0].read(), weights(1))
    assert reasons(folder) == {"alice": "its upload is already here, a second one is refused"}
