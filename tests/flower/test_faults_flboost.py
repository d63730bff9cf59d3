"""FLBoost in rounds under SIGKILL: server and actor may die in a round or in a refinement, and the bits are the same.

A client that has lost its state continues from zero, and the run with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployments import deployment
from test_faults import Command, kill_simulation, nothing_left, processes_of, run_folder, written
from test_faults_fens import scored_rounds

pytestmark = [pytest.mark.slow, pytest.mark.ray]

# A refinement takes a second, so that there is time to kill in its midst.
SETTINGS = (
    "method=iterative iterative.strategy=scaffold iterative.refiner=flboost iterative.rounds=6 iterative.fraction=0.5 "
    "iterative.checkpoint-every=2 flboost.iterations=50 flboost.generator-step=joint flboost.batch-size=16 "
    "flboost.student-steps=2 flboost.student-lr=0.01 client.epochs=4 client.lr=0.05 data.image-size=8 threads=1 "
    "min-uploads=3"
)
RUN = ["run", "--num-supernodes", "6", "--run-config", SETTINGS]
ASKED = 3
# Of the actor's CPU time, more than it takes to wait.
AT_WORK_S = 0.2
DEPLOYED = (
    "method='iterative' iterative.refiner='flboost' iterative.rounds=2 flboost.iterations=2 flboost.batch-size=16 "
    "data.image-size=8 threads=1 deadline-s=150"
)


def scored(folder: Path) -> int:
    """The rounds that are done."""
    return len(written(folder, "metrics.jsonl"))


def trained_in(folder: Path, number: int) -> set[str]:
    """The clients that have done their part of a round."""
    ends = f"-state-{number}.safetensors"
    return {path.name.removesuffix(ends) for path in (folder / "clients").glob(f"*/*{ends}")}


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rounds' rows without what a clock has measured."""
    return [{key: row[key] for key in row if not key.endswith("_s")} for row in written(folder, "metrics.jsonl")]


def actor_of(folder: Path) -> int:
    """The actor of the server stage; the simulation's clients are Ray actors too, of another class."""
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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    status, result = Command(RUN, folder).wait()
    assert status == 0
    nothing_left(folder)
    return result, numbers(folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose actor was killed in a refinement and whose server in a later one, past the last checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    command = Command(RUN, folder)
    os.kill(until_refinement(command, folder, 2), signal.SIGKILL)
    until_refinement(command, folder, 4)
    kill_simulation(folder)
    assert command.wait()[0] != 0
    nothing_left(folder)
    assert scored(folder) == 3
    assert "the Ray actor died; restart 1 of 2" in command.log.read_text()
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    """The same run once more; its clients' states too."""
    for name in ("runs", "clients"):
        shutil.copytree(folder / name, to / name)
    return to


def test_killed_in_a_refinement_and_in_a_round_it_resumes_to_the_same_bits(
    uninterrupted: tuple[dict[str, Any], list[dict[str, Any]]], killed: Path, tmp_path: Path
) -> None:
    folder = copy_of(killed, tmp_path)
    resume = ["resume", str(run_folder(folder))]
    second = Command(resume, folder)
    second.until(lambda: len(trained_in(folder, 5)) >= 1)
    kill_simulation(folder)
    assert second.wait()[0] != 0
    nothing_left(folder)
    assert scored(folder) == 4, "the round was over"

    third = Command(resume, folder)
    status, result = third.wait()
    assert status == 0
    nothing_left(folder)
    expected, rounds = uninterrupted
    assert result["resumed_at"] == 4
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["table"] == expected["table"]
    done = numbers(folder)
    # The bytes before a kill count too; all else is as in a run without faults.
    moved = {key for key in rounds[0] if key.startswith("mib_")}
    assert [{k: row[k] for k in row.keys() - moved} for row in done] == [
        {k: row[k] for k in row.keys() - moved} for row in rounds
    ]
    assert all(ours["mib_down"] >= theirs["mib_down"] for ours, theirs in zip(done, rounds, strict=True))
    assert "from zero" not in second.log.read_text() + third.log.read_text()


def test_a_client_that_lost_its_state_goes_on_from_zero_and_says_so(
    uninterrupted: tuple[dict[str, Any], list[dict[str, Any]]], killed: Path, tmp_path: Path
) -> None:
    folder = copy_of(killed, tmp_path)
    before = trained_in(folder, 1) | trained_in(folder, 2)
    client = min(before & (trained_in(folder, 3) | trained_in(folder, 4)))
    for path in (folder / "clients").glob(f"*/{client}-state-*"):
        path.unlink()

    command = Command(["resume", str(run_folder(folder))], folder)
    status, result = command.wait()
    assert status == 0
    nothing_left(folder)
    log = command.log.read_text()
    assert log.count("is not kept here: it continues from zero") == 1
    assert f"{client}: its state of round " in log
    assert f"{client} had lost its state of earlier rounds, and continues from zero" in log
    assert result["resumed_at"] == 2
    assert result["weights_sha256"] != uninterrupted[0]["weights_sha256"]
    assert [row["epoch"] for row in written(folder, "metrics.jsonl")] == list(range(1, 7))


def test_deployed_its_rounds_are_refined(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with deployment(tmp_path) as here:
        for number, name in enumerate(("alpha", "beta")):
            here.node(name, f'partition-id={number} num-partitions=2 client="{name}"')
        here.run(f"{DEPLOYED} run-dir='{run_dir}'")
        here.until((run_dir / "result.json").exists)
        logs = here.logs()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished", logs
    assert [row["answers"] for row in scored_rounds(run_dir)] == [2, 2]
    assert all(row["arithmetic_s"] > 0 and row["generator"] > 0 for row in scored_rounds(run_dir)), logs
    assert result["table"][0]["name"] == "FLBoost over FedAvg, 2 rounds"
