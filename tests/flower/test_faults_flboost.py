"""FLBoost in rounds under SIGKILL: server and actor may die in a refinement."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_faults import Command, nothing_left, processes_of, run_folder, written

pytestmark = [pytest.mark.slow, pytest.mark.ray]

# A refinement takes a second, so that there is time to kill in its midst.
SETTINGS = (
    "method=iterative iterative.strategy=scaffold iterative.refiner=flboost iterative.rounds=5 iterative.fraction=0.5 "
    "iterative.checkpoint-every=2 flboost.iterations=15 flboost.generator-step=joint "
    "flboost.student-steps=2 server.student-lr=0.01 client.epochs=4 client.lr=0.05 data.image-size=8 threads=1 "
    "min-uploads=3 compute=ray"
)
RUN = ["run", "--local", "--clients", "6", "--set", SETTINGS]
ASKED = 3
# Of the actor's CPU time, more than it takes to wait.
AT_WORK_S = 0.2


def scored(folder: Path) -> int:
    """The rounds that are done."""
    return len(written(folder, "metrics.jsonl"))


def trained_in(folder: Path, number: int) -> set[str]:
    """The clients that have done their part of a round."""
    ends = f"-state-{number}.safetensors"
    return {path.name.removesuffix(ends) for path in (folder / "clients").glob(f"*/*{ends}")}


def actor_of(folder: Path) -> int:
    """The actor of the server stage."""
    actors = [pid for pid, line in processes_of(folder).items() if line.startswith("ray::Actor")]
    assert len(actors) == 1, processes_of(folder)
    return actors[0]


def until_refinement(command: Command, folder: Path, number: int) -> int:
    """Wait for the midst of a round's refinement; the pid of the actor at work."""
    command.until(lambda: len(trained_in(folder, number)) == ASKED)
    actor = psutil.Process(actor_of(folder))
    before = actor.cpu_times().user
    command.until(lambda: actor.cpu_times().user > before + AT_WORK_S)
    assert scored(folder) == number - 1
    return int(actor.pid)


def end_all(folder: Path) -> None:
    for pid in processes_of(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    nothing_left(folder)


def test_killed_in_a_refinement_and_in_a_round_it_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """The actor dies in a refinement, and the server in a later one, past the last checkpoint.

    That neither has an effect on the bits is asked in test_compute_kept.py and test_flboost_strategy.py.
    """
    first = Command(RUN, tmp_path)
    os.kill(until_refinement(first, tmp_path, 2), signal.SIGKILL)
    until_refinement(first, tmp_path, 4)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait()[0] != 0
    end_all(tmp_path)  # Ray's own processes outlive their owner for a minute
    assert scored(tmp_path) == 3
    assert "the Ray actor died; restart 1 of 2" in first.log.read_text()

    second = Command(["resume", str(run_folder(tmp_path)), "--local"], tmp_path)
    status, result = second.wait()
    assert status == 0
    nothing_left(tmp_path)
    assert result["resumed_at"] == 2
    assert [row["epoch"] for row in written(tmp_path, "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert "from zero" not in second.log.read_text()
