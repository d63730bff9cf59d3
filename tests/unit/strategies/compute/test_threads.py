"""A server stage has as many threads as help it, and its record makes the same bits again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import Book
from torch import nn

from strategies.compute import threads
from strategies.compute.in_process import InProcess
from strategies.compute.threads import Sharing, choose_threads, follow_threads, multiplications
from strategies.core.facts import Normalization
from strategies.method import METHODS, Job, Outcome, Silent, Snapshot


def convolutional(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def a_job(channels: int, **changes: Any) -> Job:
    facts: dict[str, Any] = {
        "uploads": (), "builders": {"net": lambda: convolutional(channels)}, "student": "net", "num_classes": 10,
        "input_shape": (3, 16, 16), "normalization": Normalization((0.5,) * 3, (0.5,) * 3),
        "config": METHODS["fedavg"].config(), "threads": 0,
    }  # fmt: skip
    return Job(**{**facts, **changes})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times that the test sets, and as many threads as before the test after it."""
    times = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(threads.time, "monotonic", lambda: times["wall"])
    monkeypatch.setattr(threads.time, "process_time", lambda: times["cpu"])
    before = torch.get_num_threads()
    yield times  # type: ignore[misc]
    torch.set_num_threads(before)


def run_epochs(sharing: Sharing, clock: dict[str, float], cpu: list[float]) -> list[int]:
    """Go through epochs of two seconds each, which take so many CPU seconds; return each one's number of threads."""
    torch.set_num_threads(sharing.counts[0])
    snapshot, had = sharing.resume(), []
    for epoch, share in enumerate(cpu, start=snapshot.step if snapshot else 0):
        had.append(torch.get_num_threads())
        clock["wall"] += 2.0
        clock["cpu"] += share
        sharing.checkpoint(lambda epoch=epoch: Snapshot(epoch + 1, {"weights": 1}))  # type: ignore[misc]
    return had


def test_multiplications_are_those_of_convolutions_and_linear_layers() -> None:
    # 16 x 16 places, 4 channels of 3 x 3 x 3 each, then 1,024 inputs for 10 classes
    assert multiplications(a_job(4)) == 256 * 4 * 27 + 1024 * 10


def test_a_small_model_has_one_thread_and_a_large_one_the_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "free_cores", lambda: 3)
    assert choose_threads(a_job(4)) == 1
    assert choose_threads(a_job(2000)) == 3
    assert choose_threads(a_job(2000, threads=5)) == 5


def test_a_stage_goes_on_with_the_cores_that_it_gets_and_records_them(clock: dict[str, float]) -> None:
    book = Book()
    sharing = Sharing(a_job(2000), 4, book)
    assert run_epochs(sharing, clock, [7.0, 4.0, 3.6, 0.5, 2.0]) == [4, 4, 2, 2, 1]
    assert sharing.counts == {0: 4, 2: 2, 4: 1}
    assert [row for row in book.rows if "threads" in row] == [
        {"threads": 4, "after_epoch": 0}, {"threads": 2, "after_epoch": 2}, {"threads": 1, "after_epoch": 4},
    ]  # fmt: skip


def test_a_resumed_stage_goes_on_with_its_last_number(clock: dict[str, float]) -> None:
    book = Book(keep=True)
    run_epochs(Sharing(a_job(2000), 4, book), clock, [4.0, 3.8])
    resumed = Sharing(a_job(2000), 4, Book(book.snapshots[-1]))
    assert run_epochs(resumed, clock, [3.8, 3.8]) == [2, 2]
    assert resumed.counts == {0: 4, 1: 2}


def test_a_number_of_the_caller_stays(clock: dict[str, float]) -> None:
    assert run_epochs(Sharing(a_job(2000, threads=4), 4, Silent()), clock, [1.0, 1.0, 1.0]) == [4, 4, 4]


def test_a_replay_has_the_numbers_of_the_run(clock: dict[str, float]) -> None:
    job = follow_threads(a_job(2000), {"threads": {"0": 4, "2": 1}})
    assert run_epochs(Sharing(job, choose_threads(job), Silent()), clock, [8.0, 8.0, 0.1]) == [4, 4, 1]
    assert follow_threads(a_job(2000, threads=3), {"threads": {"0": 4}}).threads == 3


def test_an_outcome_tells_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(job: Job, progress: Any) -> Outcome:
        return Outcome(timings={"threads": float(torch.get_num_threads())})

    monkeypatch.setattr(threads, "free_cores", lambda: 2)
    monkeypatch.setattr("strategies.compute.in_process.check_needs", lambda *_: None)
    for channels, wanted in ((4, 1), (2000, 2)):
        outcome = InProcess().run(replace(METHODS["fedavg"], fit=fit), a_job(channels), Silent())
        assert outcome.threads == {0: wanted}
        assert outcome.timings["threads"] == wanted
