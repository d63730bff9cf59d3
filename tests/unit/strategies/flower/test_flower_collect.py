"""The upload phase: every node is asked once, what comes is stored, and a bad answer costs that answer alone."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from flower_fakes import (
    CLASSES,
    SIGNATURES,
    Client,
    FakeGrid,
    answering,
    collector,
    equal,
    failing,
    named,
    reasons,
    records,
    silent,
    stock,
    weights,
)
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from strategies.client import failure, upload_facts
from strategies.core.durable import atomic_write
from strategies.core.errors import QuorumError, StoreError
from strategies.core.facts import Agreement, held_digest
from strategies.flower.asking import Exchange
from strategies.flower.collect import ALONE_S, Collector
from strategies.flower.messages import Request, count_bytes
from strategies.flower.names import ClientNames
from strategies.flower.nodes import SETTLE_S
from strategies.flower.results import log_scores
from strategies.run.run_folder import RoundFolder

REQUEST = Request(ArrayRecord(), {"lr": 0.1}, 1, "f00", 5)


def take(
    folder: RoundFolder, grid: FakeGrid, *, timeout: float = 5.0, min_uploads: int = 1
) -> tuple[Collector, Exchange]:
    phase = collector(folder)
    return phase, phase.collect(grid, REQUEST, timeout=timeout, min_uploads=min_uploads)


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


def test_collect_refuses_a_client_whose_classes_are_others_and_says_who_names_none(
    folder: RoundFolder, said: list[str]
) -> None:
    ours = named("alice", 1, classes=["cat", "dog", "owl", "yak"])
    theirs = named("bob", 2, classes=["ant", "cat", "dog", "owl"])
    phase = Collector(
        folder, SIGNATURES, num_classes=CLASSES, max_bytes=10**6, agreement=Agreement.of(["cat", "dog", "owl", "yak"])
    )
    phase.collect(FakeGrid({1: ours, 2: theirs, 3: named("carol", 3)}), REQUEST, timeout=5.0, min_uploads=2)
    assert folder.held() == ["alice", "carol"]
    assert "classes differ from those of the server: class 0 is 'ant' here and 'cat' there" in reasons(folder)["bob"]
    assert "classes are not named by carol: that they have one order is not checked" in said
    again = collector(folder)  # a resumed run compares with what is stored
    again.collect(FakeGrid({2: theirs}), REQUEST, timeout=5.0, min_uploads=2)
    assert folder.held() == ["alice", "carol"]


@pytest.mark.parametrize("simulation", [True, False])
def test_collect_when_a_node_joins_late_asks_it_once(
    folder: RoundFolder, monkeypatch: pytest.MonkeyPatch, simulation: bool
) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, joins={2: 5}, simulation=simulation)
    take(folder, grid)
    assert grid.of_type() == [1, 2]
    assert folder.held() == ["alice", "bob"]


def test_collect_in_deployment_waits_for_as_many_nodes_as_the_quorum(folder: RoundFolder) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, joins={2: 50}, simulation=False)
    take(folder, grid, timeout=60.0, min_uploads=2)
    assert folder.held() == ["alice", "bob"]


garbage = records({**weights(1), "4.bias": weights(1)["4.bias"] / 0})


def broken(message: Message) -> Message:
    return failure(message, client="carol", reason="the disk: is gone")


TRACEBACK = "\x1b[36mray::Actor\x1b[39m (pid=7)\n  File 'x.py', line 3\n\x1b[31mValueError: no data\x1b[0m\n\n"
CLAIM = RecordDict({"upload": ConfigRecord({**upload_facts(client="alice"), "held": True})})
BAD: list[tuple[Client, str, str]] = [
    (answering(garbage), "node-2", "arrays['4.bias'] holds NaN or Inf: must be finite values"),
    (broken, "carol", "the disk: is gone"),
    (answering(RecordDict()), "node-2", "the reply has 0 array records, must be one, named 'arrays'"),
    (failing(TRACEBACK), "node-2", "ValueError: no data"),  # the last line alone
    (answering(CLAIM), "alice", "upload.held is true, but its upload is not here"),
    (named("bob", 2), "bob", "its upload is already here, a second one is refused"),
]


@pytest.mark.parametrize(("client", "name", "reason"), BAD, ids=[reason for *_, reason in BAD])
def test_collect_when_an_answer_is_bad_refuses_it_and_goes_on(
    folder: RoundFolder, said: list[str], client: Client, name: str, reason: str
) -> None:
    take(folder, FakeGrid({1: named("bob", 1), 2: client}))
    assert folder.held() == ["bob"]
    assert equal(folder.uploads()[0].read(), weights(1))
    (told,) = reasons(folder).items()
    assert told[0] == name
    assert told[1].startswith(reason)
    assert any(line.startswith(f"refused {name}: {reason}") for line in said)


def test_collect_when_the_disk_refuses_an_upload_ends_and_a_resumed_run_takes_it(
    folder: RoundFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {1: named("alice", 1), 2: named("bob", 2)}
    write = atomic_write

    def full(path: Path, data: bytes) -> None:
        if path.name == "bob.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    with monkeypatch.context() as disk:
        disk.setattr("strategies.run.uploads.atomic_write", full)
        with pytest.raises(StoreError, match="^bob: disk full, .*Make room there and resume: 1 uploads are kept"):
            take(folder, FakeGrid(grid), min_uploads=1)
    take(folder, FakeGrid(grid), min_uploads=1)
    assert folder.held() == ["alice", "bob"]


def test_a_client_without_a_name_whose_second_upload_the_disk_takes_is_not_missed(
    folder: RoundFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def answer(node: int, seed: int) -> Message:
        return FakeGrid({node: stock(seed)}).send_and_receive([REQUEST.message(node)], timeout=1.0)[0]

    phase = collector(folder)
    phase.take(answer(2, 3))
    with monkeypatch.context() as disk:
        disk.setattr("strategies.run.uploads.atomic_write", full)
        phase.take(answer(1, 4))
    with pytest.raises(StoreError, match="^anonymous-.*: disk full, .*Make room there and resume: 1 uploads are kept"):
        phase.check_quorum(1, 2, 5.0)
    phase.take(answer(1, 5))  # trained anew, so its name is another
    phase.check_quorum(2, 2, 5.0)
    assert len(folder.held()) == 2


def test_collect_when_the_run_folder_is_removed_meanwhile_says_so(folder: RoundFolder) -> None:
    def removing(message: Message) -> Any:
        shutil.rmtree(folder.path)
        return named("bob", 2)(message)

    with pytest.raises(StoreError, match="has lost the uploads of alice while the run worked: put its files back, or"):
        take(folder, FakeGrid({1: named("alice", 1), 2: removing}, joins={2: 5}))


def test_a_mean_says_whose_number_it_leaves_out(folder: RoundFolder, said: list[str]) -> None:
    def reports(seed: int, **metrics: float) -> Any:
        return answering(records(weights(seed), facts=upload_facts(client=f"c{seed}"), **metrics))

    ok = {"loss": 1.0, "epsilon": 2.0}
    grid = {1: reports(1, **ok), 2: reports(2, **ok | {"loss": math.nan}), 3: reports(3, loss=4.0)}
    phase, _ = take(folder, FakeGrid(grid))
    assert phase.mean_metrics() == phase.mean_metrics() == {"loss": 2.5}
    assert said.count("the mean of loss is of 2 of 3 clients: no finite number comes from c2") == 1
    assert "epsilon has no largest value: no finite number comes from c3" in said


EVIL = "x\r\n\x1b[2J\x1b[31mERROR all is lost\u202e" + "a" * 10**4


def test_names_that_a_client_chooses_stay_in_one_short_line_of_the_log(folder: RoundFolder, said: list[str]) -> None:
    evil = records(weights(1), facts=upload_facts(client="eve"), **{EVIL: 1.0, f"{EVIL}nan": math.nan})
    evil[EVIL] = ArrayRecord(weights(2))
    other = records(None)
    other[EVIL] = ArrayRecord(weights(3) | {EVIL: weights(3)["4.bias"]})

    phase, _ = take(folder, FakeGrid({1: answering(evil), 2: answering(other), 3: failing(EVIL)}))
    log_scores("Metrics", MetricRecord(phase.mean_metrics()))
    assert sum("aaaa" in line for line in said) == 4
    assert all(line.isprintable() and len(line) < 4200 for line in said)


def test_collect_when_the_deadline_passes_goes_on_with_the_quorum(folder: RoundFolder, clock: Any) -> None:
    _, found = take(folder, FakeGrid({1: named("alice", 1), 2: silent}), timeout=30.0)
    assert clock.now == pytest.approx(30.0)
    assert folder.held() == ["alice"]
    assert found.waiting_for == (2,)
    assert reasons(folder) == {"node-2": "no answer within 30 s"}


def test_collect_when_the_quorum_is_missed_names_missing_clients_and_keeps_the_rest(folder: RoundFolder) -> None:
    grid = FakeGrid(
        {1: named("alice", 1), 2: silent, 3: failing("ValueError: no data"), 4: answering(RecordDict())}, gone=[4]
    )
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
    assert equal(folder.uploads()[0].read(), weights(1))


def test_collect_when_a_client_that_is_held_is_asked_does_not_work_again(folder: RoundFolder) -> None:
    work: list[str] = []
    take(folder, FakeGrid({1: named("alice", 1, work=work)}))
    grid = FakeGrid({8: named("alice", 9, work=work), 9: named("bob", 2, work=work)})
    phase, _ = take(folder, grid, min_uploads=2)
    assert work == ["alice", "bob"]
    assert grid.asked[0].content["config"]["held"] == [held_digest("alice", grid.asked[0].content["config"]["run-id"])]
    assert phase.clients == {"alice", "bob"}
    assert folder.refused() == []


@pytest.mark.parametrize(("enrolled", "most"), [(2, 2 * SETTLE_S), (3, ALONE_S + 5.0), (None, ALONE_S + 5.0)])
def test_collect_when_a_resumed_deployment_has_its_uploads_and_no_node_goes_on(
    folder: RoundFolder, clock: Any, monkeypatch: pytest.MonkeyPatch, enrolled: int | None, most: float
) -> None:
    take(folder, FakeGrid({1: named("alice", 1), 2: named("bob", 2)}, simulation=False), min_uploads=2)
    monkeypatch.setattr(ClientNames, "enrolled", enrolled)
    began = clock.now

    phase, _ = take(folder, FakeGrid({}, simulation=False), timeout=3600.0, min_uploads=2)

    assert phase.clients == {"alice", "bob"}
    assert clock.now - began <= most


def test_collect_counts_the_bytes_of_both_ways(folder: RoundFolder) -> None:
    grid = FakeGrid({1: named("alice", 1), 2: answering(garbage)})
    phase, _ = take(folder, grid)
    answer = named("alice", 1)(grid.asked[0])
    assert phase.traffic.up == {"alice": count_bytes(answer.content)}
    assert phase.traffic.down == {"alice": count_bytes(grid.asked[0].content)}
    # The bytes before a crash count too.
    assert collector(folder).traffic == phase.traffic
