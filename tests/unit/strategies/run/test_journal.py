"""The journal says where a stage is, keeps what it measures, and knows where it was cut off."""

from __future__ import annotations

import time

import pytest
import torch
from flower_fakes import Clock

from strategies.method import Progress, Snapshot
from strategies.run import journal as journal_module
from strategies.run.journal import Journal, duration
from strategies.run.round_folder import RoundFolder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(journal_module, "monotonic", clock.monotonic)
    return clock


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, {"w": torch.full((2,), float(step))})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (8.4, "8 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3599.7, "1 h 0 min"),
        (3780, "1 h 3 min"),
    ],
)
def test_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_report_says_step_total_values_elapsed_and_the_rest(clock: Clock) -> None:
    lines: list[str] = []
    journal = Journal(None, lines.append, label="dense")
    clock.now += 8
    journal.report(12, 200, {"loss": 0.41234})
    assert lines == ["dense: epoch 12 of 200, loss 0.412, 8 s elapsed, about 2 min 5 s left"]


def test_report_logs_the_first_then_every_five_seconds_and_the_last_once(clock: Clock) -> None:
    lines: list[str] = []
    journal = Journal(None, lines.append, label="x")
    for step in range(1, 13):
        clock.now += 1
        journal.report(step, 12)
    journal.report(12, 12)
    assert [line.split(",")[0] for line in lines] == [f"x: epoch {step} of 12" for step in (1, 6, 11, 12)]
    assert lines[-1] == "x: epoch 12 of 12, 12 s elapsed"


def test_heartbeat_says_the_last_known_state_when_nothing_else_is_logged() -> None:
    lines: list[str] = []
    with Journal(None, lines.append, label="x", heartbeat_s=0.05) as journal:
        wait_for(lambda: len(lines) >= 1)
        journal.report(3, 9, {"loss": 1.0})
        reported = len(lines)
        wait_for(lambda: len(lines) >= reported + 2)
    assert lines[0].startswith("x: starting, 0 s elapsed")
    assert all(line.startswith("x: epoch 3 of 9, loss 1, 0 s elapsed") for line in lines[reported:])
    said = len(lines)
    time.sleep(0.12)
    assert len(lines) == said


def wait_for(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_checkpoint_is_taken_only_after_the_interval(clock: Clock, folder: RoundFolder) -> None:
    taken: list[int] = []

    def take(step: int) -> Snapshot:
        taken.append(step)
        return snapshot(step)

    journal = Journal(folder, lambda _: None, label="x", interval_s=20.0)
    assert journal.resume() is None
    for step in range(1, 9):
        clock.now += 7
        journal.checkpoint(lambda step=step: take(step))
    assert taken == [3, 6]
    saved = folder.load_checkpoint()
    assert saved.step == 6


def test_resume_goes_on_from_the_checkpoint_with_every_epoch_once(folder: RoundFolder) -> None:
    first: Progress = Journal(folder, lambda _: None, label="x", interval_s=0.0)
    assert first.resume() is None
    first.record({"about": "clients"})
    for epoch in (1, 2, 3):
        first.record({"epoch": epoch})
        if epoch < 3:
            first.checkpoint(lambda epoch=epoch: snapshot(epoch))
    second = Journal(folder, lambda _: None, label="x")
    found = second.resume()
    assert (found.step, second.resumed_at) == (2, 2)
    assert torch.equal(found.state["w"], torch.full((2,), 2.0))
    second.record({"epoch": 3})
    assert folder.metrics() == [{"about": "clients"}, {"epoch": 1}, {"epoch": 2}, {"epoch": 3}]
