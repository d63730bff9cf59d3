"""The upload phase: every node is asked once, what comes is stored, and a bad answer costs that answer alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flower_fakes import (
    CLASSES,
    SIGNATURES,
    Client,
    FakeGrid,
    equal,
    failing,
    named,
    net,
    records,
    silent,
    stock,
    weights,
)
from flwr.app import ArrayRecord, Error, Message, RecordDict

from strategies.client import failure, held_mark, upload_facts
from strategies.core.errors import QuorumError, StoreError
from strategies.flower.asking import Exchange
from strategies.flower.collect import ALONE_S, Collector
from strategies.flower.messages import Request, count_bytes
from strategies.flower.names import Names
from strategies.flower.nodes import SETTLE_S, own_error
from strategies.run.run_folder import RoundFolder, RunFolder

REQUEST = Request(ArrayRecord(), {"lr": 0.1}, 1, "f00", 5)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RoundFolder]:
    with RunFolder.create(tmp_path / "run", {}) as run:
        yield run.round(1)


def collector(folder: RoundFolder) -> Collector:
    return Collector(folder, SIGNATURES, num_classes=CLASSES, max_bytes=10**6)


def take(
    folder: RoundFolder, grid: FakeGrid, *, timeout: float = 5.0, min_uploads: int = 1
) -> tuple[Collector, Exchange]:
    phase = collector(folder)
    return phase, phase.collect(grid, REQUEST, timeout=timeout, min_uploads=min_uploads)


def reasons(folder: RoundFolder) -> dict[str, str]:
    return {row["client"]: row["reason"] for row in folder.refused()}


def test_collect_when_all_answer_stores_their_uploads(folder: RoundFolder, said: list[str]) -> None:
    phase, found = take(folder, FakeGrid({1: named("alice", 1, label_counts=[1, 2, 3, 4]), 2: named("bob", 2)}))
    assert folder.held() == ["alice", "bob"]
    assert phase.clients == {"alice", "bob"}
    assert (found.asked, found.waiting_for) == (2, ())
    alice, bob = folder.uploads()
    assert (alice.architecture, alice.num_examples, alice.label_counts) == ("net", 10, (1, 2, 3, 4))
    assert (bob.num_examples, bob.label_counts) == (12, None)
    assert equal(bob.read(), weights(2))
    assert any(line.startswith("upload of bob: net, ") and line.endswith(" MiB, stored") for line in said)


def test_metrics_of_most_clients_are_averaged_without_those_that_report_no_finite_number(folder: RoundFolder) -> None:
    def reporting(seed: int, **metrics: Any) -> Client:
        return lambda message: Message(records(weights(seed), num_examples=seed, **metrics), reply_to=message)

    clients = {1: reporting(1, loss=1.0), 3: reporting(3, loss=2.0), 5: reporting(5, loss=float("nan"), other=1.0)}
    phase, _ = take(folder, FakeGrid(clients))
    assert phase.mean_metrics() == {"loss": pytest.approx((1.0 + 3 * 2.0) / 4)}


def test_collect_pulls_ids_one_by_one_and_answered_ones_no_more(folder: RoundFolder) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, delays={2: 3})
    take(folder, grid)
    assert all(len(ids) == 1 for ids in grid.pulls)
    asked = [ids[0] for ids in grid.pulls]
    assert asked.count("message-0") == 1
    assert asked.count("message-1") == 4


@pytest.mark.parametrize("simulation", [True, False])
def test_collect_when_a_node_joins_late_asks_it_once(
    folder: RoundFolder, monkeypatch: pytest.MonkeyPatch, simulation: bool
) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, joins={2: 5}, simulation=simulation)
    take(folder, grid)
    assert grid.of_type() == [1, 2]
    assert folder.held() == ["alice", "bob"]


def test_collect_in_deployment_waits_for_as_many_nodes_as_the_quorum(folder: RoundFolder) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, joins={2: 200}, simulation=False)
    take(folder, grid, timeout=60.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]


def test_collect_in_simulation_does_not_wait_for_nodes_that_cannot_come(folder: RoundFolder, clock: Any) -> None:
    with pytest.raises(QuorumError, match="only 1 of at least 2 nodes connected"):
        take(folder, FakeGrid({1: named("alice", 1)}), timeout=3600.0, min_uploads=2)
    assert clock.now < 5.0


def test_collect_when_a_node_raises_keeps_the_last_line_and_goes_on(folder: RoundFolder, said: list[str]) -> None:
    traceback = "\x1b[36mray::Actor\x1b[39m (pid=7)\n  File 'x.py', line 3\n\x1b[31mValueError: no data\x1b[0m\n\n"
    take(folder, FakeGrid({1: failing(traceback), 2: named("bob", 2)}))
    assert folder.held() == ["bob"]
    assert reasons(folder) == {"node-1": "ValueError: no data"}
    assert "refused node-1: ValueError: no data" in said


@pytest.mark.parametrize(
    ("reason", "line"),
    [("", "error code 2"), ("\x1b[0m\n \n", "no reason given"), ("a\nb" + "c" * 900, "b" + "c" * 499)],
)
def test_collect_when_a_node_fails_without_words_says_so(folder: RoundFolder, reason: str, line: str) -> None:
    take(folder, FakeGrid({1: failing(reason), 2: named("bob", 2)}))
    assert reasons(folder) == {"node-1": line}
    assert own_error(Message(Error(code=2, reason="only\r\none"), reply_to=REQUEST.message(1))) == "one"


def garbage(message: Message) -> Message:
    state = weights(1)
    state["4.bias"] = state["4.bias"] / 0
    return Message(records(state), reply_to=message)


def broken(message: Message) -> Message:
    return failure(message, client="carol", reason="the disk: is gone")


def nothing(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def test_collect_when_answers_are_bad_refuses_each_and_goes_on(folder: RoundFolder) -> None:
    take(folder, FakeGrid({1: garbage, 2: broken, 3: nothing, 4: named("bob", 2)}))
    assert folder.held() == ["bob"]
    assert reasons(folder) == {
        "node-1": "arrays['4.bias'] holds NaN or Inf; must be finite values",
        "carol": "the disk: is gone",
        "node-3": "the reply has 0 array records, must be one, named 'arrays'",
    }


def test_collect_when_the_deadline_passes_goes_on_with_the_quorum(folder: RoundFolder, clock: Any) -> None:
    _, found = take(folder, FakeGrid({1: named("alice", 1), 2: silent}), timeout=30.0)
    assert clock.now == pytest.approx(30.0)
    assert folder.held() == ["alice"]
    assert found.waiting_for == (2,)
    assert reasons(folder) == {"node-2": "no answer within 30 s"}


def test_collect_when_the_quorum_is_missed_names_missing_clients_and_keeps_the_rest(folder: RoundFolder) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: silent, 3: failing("ValueError: no data"), 4: nothing}, gone=[4])
    with pytest.raises(QuorumError) as caught:
        take(folder, grid, timeout=30.0, min_uploads=5)
    text = str(caught.value)
    assert text.startswith("1 uploads arrived, min-uploads is 5. Missing: ")
    for part in (
        "node-2: no answer within 30 s",
        "node-3: ValueError: no data",
        "node-4: the node has left",
        "only 4 of at least 5 nodes connected",
        f"The uploads that arrived are kept in {folder.path}",
    ):
        assert part in text
    assert "\n" not in text
    assert equal(folder.uploads()[0].read(), weights(1))


@pytest.mark.parametrize("simulation", [True, False])
def test_collect_when_no_client_connects_says_so(folder: RoundFolder, simulation: bool) -> None:
    with pytest.raises(QuorumError, match=r"0 uploads arrived, .* Missing: no client connected within 30 s\. The"):
        take(folder, FakeGrid({}, simulation=simulation), timeout=30.0)


def test_collect_when_it_takes_long_says_whom_it_waits_for(folder: RoundFolder, said: list[str]) -> None:
    take(folder, FakeGrid({1: named("alice", 1), 2: silent}), timeout=30.0)
    lines = [line for line in said if line.startswith("uploads: 1 here, waiting for 1 of 2 nodes, ")]
    assert [line.split(", ")[-1] for line in lines] == [f"{left} s to the deadline" for left in (21, 12, 3)]


def test_collect_when_two_clients_share_a_name_keeps_the_first(folder: RoundFolder) -> None:
    take(folder, FakeGrid({1: named("alice", 1), 2: named("alice", 2)}))
    assert equal(folder.uploads()[0].read(), weights(1))
    assert reasons(folder) == {"alice": "its upload is already here, a second one is refused"}


def test_collect_when_nameless_clients_have_equal_weights_keeps_them_all(folder: RoundFolder) -> None:
    phase, _ = take(folder, FakeGrid({1: stock(1), 2: stock(1), 3: stock(2), 4: stock(1)}))
    first = next(name for name in folder.held() if name.endswith("-3")).removesuffix("-3")
    assert {first, f"{first}-2", f"{first}-3"} < set(folder.held()) == phase.clients
    assert len(phase.clients) == 4


def test_collect_when_a_client_that_is_held_is_asked_does_not_work_again(folder: RoundFolder) -> None:
    work: list[str] = []
    take(folder, FakeGrid({1: named("alice", 1, work=work)}))
    grid = FakeGrid({8: named("alice", 9, work=work), 9: named("bob", 2, work=work)})
    phase, _ = take(folder, grid, min_uploads=2)
    assert work == ["alice", "bob"]
    assert grid.asked[0].content["config"]["held"] == [held_mark("alice", grid.asked[0].content["config"]["run-id"])]
    assert phase.clients == {"alice", "bob"}
    assert folder.refused() == []


def test_collect_when_a_node_comes_back_under_another_id_does_not_ask_it_for_work(
    folder: RoundFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[str] = []
    nodes = {1: named("alice", 1, work=work), 2: named("alice", 1, work=work)}
    take(folder, FakeGrid(nodes, joins={2: 5}))
    assert work == ["alice"]
    assert folder.refused() == []


@pytest.mark.parametrize(("enrolled", "most"), [(2, 2 * SETTLE_S), (3, ALONE_S + 5.0), (None, ALONE_S + 5.0)])
def test_collect_when_a_resumed_deployment_has_its_uploads_and_no_node_goes_on(
    folder: RoundFolder, clock: Any, monkeypatch: pytest.MonkeyPatch, enrolled: int | None, most: float
) -> None:
    take(folder, FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, simulation=False), min_uploads=2)
    monkeypatch.setattr(Names, "enrolled", enrolled)
    began = clock.now

    phase, _ = take(folder, FakeGrid({}, simulation=False), timeout=3600.0, min_uploads=2)

    assert phase.clients == {"alice", "bob"}
    assert clock.now - began <= most


def test_collect_when_a_resumed_deployment_has_its_quorum_takes_a_node_that_connects_again(folder: RoundFolder) -> None:
    take(folder, FakeGrid({1: named("alice", 1)}, simulation=False))
    take(folder, FakeGrid({2: named("bob", 2)}, joins={2: 5}, simulation=False), timeout=3600.0)
    assert folder.held() == ["alice", "bob"]


def test_collect_when_a_client_claims_an_upload_that_is_not_here_refuses_it(folder: RoundFolder) -> None:
    def claims(message: Message) -> Message:
        content = RecordDict({"upload": named("x", 1)(message).content["upload"]})
        content["upload"].update({"client": "alice", "held": True})
        return Message(content, reply_to=message)

    with pytest.raises(QuorumError, match="alice: upload.held is true, but its upload is not here"):
        take(folder, FakeGrid({1: claims}))


def test_collect_when_nameless_clients_are_asked_anew_counts_each_once(folder: RoundFolder, said: list[str]) -> None:
    take(folder, FakeGrid({1: stock(1), 2: stock(2), 3: named("alice", 3)}))
    first = set(folder.held())
    # Another process: one nameless client ends with the weights it had, the other does not.
    phase, _ = take(folder, FakeGrid({4: stock(1), 5: stock(8), 6: named("alice", 9)}))
    assert len(phase.clients) == 3
    assert len(first & phase.clients) == 2
    assert len(folder.held()) == 4
    assert "2 uploads of clients without a name are here: those clients are asked anew" in said
    with pytest.raises(QuorumError, match="1 uploads arrived, min-uploads is 2"):
        take(folder, FakeGrid({7: named("alice", 3)}), min_uploads=2)


def test_collect_when_tried_again_names_only_clients_missing_now(folder: RoundFolder) -> None:
    with pytest.raises(QuorumError, match="node-1: first"):
        take(folder, FakeGrid({1: failing("first")}))
    with pytest.raises(QuorumError, match="Missing: node-2: second. The"):
        take(folder, FakeGrid({2: failing("second")}))


def test_collect_when_tried_again_and_refused_alike_records_it_once_and_names_it_again(
    folder: RoundFolder, said: list[str]
) -> None:
    for _ in range(2):
        with pytest.raises(QuorumError, match="Missing: node-1: no data. The"):
            take(folder, FakeGrid({1: failing("no data")}))
    assert [(row["client"], row["reason"]) for row in folder.refused()] == [("node-1", "no data")]
    assert said.count("refused node-1: no data") == 2


def test_collect_when_an_upload_comes_late_keeps_it_apart(folder: RoundFolder, said: list[str]) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, delays={2: 10**9})
    phase, found = take(folder, grid, timeout=30.0)
    phase.close()
    grid._delays[2] = 0
    found.poll()
    assert folder.held() == ["alice", "bob"]
    assert any("came late: kept for replay, not part of this result" in line for line in said)
    found.poll()
    assert len(grid.pulls[-1]) == 1


def test_collect_counts_the_bytes_of_both_ways(folder: RoundFolder) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: garbage})
    phase, _ = take(folder, grid)
    answer = named("alice", 1)(grid.asked[0])
    assert answer is not None
    assert phase.traffic.up == {"alice": count_bytes(answer.content)}
    assert phase.traffic.down == {"alice": count_bytes(grid.asked[0].content)}
    # The bytes before a crash count too.
    assert collector(folder).traffic == phase.traffic


def test_collect_when_the_caller_sends_empty_settings_counts_them(folder: RoundFolder) -> None:
    request = Request(ArrayRecord(net().state_dict()), {"note": "", "list": []}, 1, "f00", 5)
    collector(folder).collect(FakeGrid({1: named("alice", 1)}), request, timeout=5.0, min_uploads=1)
    assert folder.held() == ["alice"]


def full_disk(*_: Any) -> None:
    raise StoreError("traffic.json: No space left on device")


def test_collect_when_the_account_cannot_be_written_goes_on(
    folder: RoundFolder, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.run.traffic.write_json", full_disk)
    take(folder, FakeGrid({1: named("alice", 1)}))
    assert folder.held() == ["alice"]
    assert "traffic.json: No space left on device" in said


def test_collect_stores_the_ranges_that_come_with_an_upload(folder: RoundFolder) -> None:
    def calibrated(message: Message) -> Message:
        facts = upload_facts(client="alice", ranges={"0": (-0.5, 1.25), "<input>": (0.0, 1.0)})
        return Message(records(weights(1), facts=facts), reply_to=message)

    take(folder, FakeGrid({1: calibrated, 2: named("bob", 2)}))
    alice, bob = folder.uploads()
    assert alice.ranges == {"0": (-0.5, 1.25), "<input>": (0.0, 1.0)}
    assert bob.ranges is None
