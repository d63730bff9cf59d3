"""Nodes whose plug is pulled during a question: repeated questions, waiting, and log lines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from flower_fakes import DeployedGrid, FakeGrid, collector, failing, in_turn, named, reasons, silent, unavailable
from flwr.app import ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode

from strategies.core.errors import QuorumError
from strategies.flower.messages import Request
from strategies.run.run_folder import RoundFolder

REQUEST = Request(ArrayRecord(), {}, 1, "f00", 5)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (ErrorCode.CLIENT_APP_CRASHED, "the process of its ClientApp ended without an answer"),
        (ErrorCode.NODE_UNAVAILABLE, "the connection to the node was lost"),
        (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "its answer was lost on its way"),
    ],
)
def test_collect_when_an_answer_is_lost_asks_the_node_again_and_refuses_nothing(
    folder: RoundFolder, said: list[str], code: int, line: str
) -> None:
    grid = DeployedGrid({1: in_turn(partial(unavailable, code=code), named("alice", 1)), 2: named("bob", 2)})
    collector(folder).collect(grid, REQUEST, timeout=60.0, min_uploads=2)
    assert grid.of_type() == [1, 2, 1]
    assert folder.held() == ["alice", "bob"]
    assert folder.refused() == []
    assert f"node-1: {line}; it is asked again when it is connected" in said


@pytest.mark.parametrize("code", [ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION])
def test_collect_when_a_client_itself_fails_does_not_ask_it_again(folder: RoundFolder, code: int) -> None:
    own = lambda message: Message(Error(code=code, reason="no data"), reply_to=message)  # noqa: E731
    grid = DeployedGrid({1: own, 2: named("bob", 2)})
    collector(folder).collect(grid, REQUEST, timeout=60.0, min_uploads=1)
    assert grid.of_type() == [1, 2]
    assert reasons(folder) == {"node-1": "no data"}


def test_collect_when_a_node_comes_back_under_another_id_does_not_wait_for_the_old_one(
    folder: RoundFolder, clock: Any
) -> None:
    grid = DeployedGrid({1: silent, 2: named("alice", 1), 3: named("bob", 2)}, joins={2: 50}, away={1: (100, 10**9)})
    collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]
    assert clock.now < 60.0
    assert reasons(folder) == {"node-1": "the connection to the node was lost, and it has not come back"}


def test_collect_when_lost_nodes_leave_the_quorum_open_waits_for_them_to_the_deadline(
    folder: RoundFolder, clock: Any
) -> None:
    grid = DeployedGrid({1: silent, 2: named("bob", 2)}, away={1: (20, 10**9)})
    with pytest.raises(QuorumError, match="node-1: the connection to the node was lost, and it has not come back"):
        collector(folder).collect(grid, REQUEST, timeout=300.0, min_uploads=2)
    assert clock.now == pytest.approx(300.0)


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


def test_collect_when_a_node_goes_and_comes_back_under_its_id_asks_it_again(folder: RoundFolder) -> None:
    grid = DeployedGrid({1: in_turn(silent, named("alice", 1)), 2: named("bob", 2)}, away={1: (20, 300)})
    collector(folder).collect(grid, REQUEST, timeout=3600.0, min_uploads=2)
    assert grid.of_type() == [1, 2, 1]
    assert folder.held() == ["alice", "bob"]
    assert folder.refused() == []


def test_collect_when_one_clients_second_upload_is_refused_still_waits_for_the_quorum_of_clients(
    folder: RoundFolder,
) -> None:
    nodes = {1: named("alice", 1), 2: named("alice", 2), 3: named("bob", 3)}
    collector(folder).collect(DeployedGrid(nodes, joins={3: 100}), REQUEST, timeout=3600.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]


def test_collect_in_a_simulation_does_not_ask_a_failed_node_for_ever(folder: RoundFolder, clock: Any) -> None:
    with pytest.raises(QuorumError):
        collector(folder).collect(FakeGrid({1: failing("ActorDiedError")}), REQUEST, timeout=3600.0, min_uploads=1)
    assert clock.now < 10.0
