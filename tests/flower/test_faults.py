"""The whole command under SIGINT and SIGKILL: no client trains twice, and the result has the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from strategies.core.durable import verify_digest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_plots")]

ONESHOT = [str(Path(sys.executable).with_name("oneshot"))]
SETTINGS = (
    "method=dense client.epochs=40 server.epochs=40 server.generator-steps=4 server.steps-per-epoch=4 "
    "server.synthesis-batch-size=32 data.image-size=8 checkpoint-s=0 threads=1 min-uploads=4"
)
RUN = ["run", "--clients", "4", "--set", SETTINGS]
PATIENCE_S = 300.0


class Command:
    """A running ``oneshot`` in a process group of its own, its output in a file."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        self._output = self.log.open("w")
        self._process = subprocess.Popen(
            [*ONESHOT, *arguments, "--format", "json"],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"ONESHOT_CLIENT_STATE": str(folder / "clients"), "ONESHOT_RUNS": str(folder / "runs")},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> tuple[int, dict[str, Any]]:
        status = self._process.wait(PATIENCE_S)
        self._output.close()
        lines = self.log.read_text().splitlines()
        return status, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def trained(self) -> set[str]:
        """Names of the clients that began to train."""
        return set(re.findall(r"(client-\d+): epoch 1 of", self.log.read_text()))


def run_folder(folder: Path) -> Path:
    return next((folder / "runs").iterdir())


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that is being written: those that are whole by now."""
    return [verify_digest(json.loads(line)) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def written(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file of the run: none before the run has a folder."""
    return [row for path in (folder / "runs").glob(f"*/{name}") for row in rows(path)]


def uploads_in(folder: Path) -> list[str]:
    return [row["client"] for row in written(folder, "uploads.jsonl")]


def kept_in(folder: Path) -> set[str]:
    """Names of the clients that have kept what they trained."""
    return {path.name.removesuffix("-1.json") for path in (folder / "clients").glob("*/*.json")}


def processes_of(folder: Path) -> dict[int, str]:
    """Pid -> command line of the processes whose environment names this test's folder."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
            if alive and str(folder).encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_run_that_was_ended_twice_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Ctrl-C while the clients of a simulation upload; a kill while the student learns, and the rest, in one process.

    That a killed simulation leaves no process is asked in test_launch.py.
    """
    first = Command(RUN, tmp_path)
    first.until(lambda: len(uploads_in(tmp_path)) >= 1)
    os.kill(first.pid, signal.SIGINT)
    assert first.wait()[0] == 130
    assert f"oneshot resume {run_folder(tmp_path)}" in first.log.read_text()
    nothing_left(tmp_path)
    held, kept = uploads_in(tmp_path), kept_in(tmp_path)
    assert 1 <= len(held) < 4

    resume = ["resume", str(run_folder(tmp_path)), "--local"]
    second = Command(resume, tmp_path)
    second.until((run_folder(tmp_path) / "checkpoint" / "checkpoint.json").exists)
    os.killpg(second.pid, signal.SIGKILL)
    assert second.wait()[0] != 0
    assert not second.trained() & ({*held} | kept), "a client trained twice"

    last = Command(resume, tmp_path)
    status, result = last.wait()
    assert status == 0
    assert last.trained() == set()
    assert result["resumed_at"] > 0
    assert result["uploads"] == 4

    other = tmp_path / "uninterrupted"
    other.mkdir()
    status, uninterrupted = Command([*RUN, "--local"], other).wait()
    assert status == 0
    for key in ("weights_sha256", "table", "mib_up_per_client"):
        assert result[key] == uninterrupted[key], key
    nothing_left(tmp_path)


# FLBoost in rounds.

# A refinement takes a second, so that there is time to kill in its midst.
FLBOOST = (
    "method=iterative iterative.strategy=scaffold iterative.refiner=flboost iterative.rounds=5 iterative.fraction=0.5 "
    "iterative.checkpoint-every=2 flboost.iterations=15 flboost.generator-step=joint "
    "flboost.student-steps=2 server.student-lr=0.01 client.epochs=4 client.lr=0.05 data.image-size=8 threads=1 "
    "min-uploads=3 compute=ray"
)
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


@pytest.mark.ray
def test_flboost_killed_in_a_refinement_and_in_a_round_it_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """The actor dies in a refinement, and the server in a later one, past the last checkpoint.

    That neither has an effect on the bits is asked in test_compute_kept.py and test_flboost_strategy.py.
    """
    first = Command(["run", "--local", "--clients", "6", "--set", FLBOOST], tmp_path)
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
