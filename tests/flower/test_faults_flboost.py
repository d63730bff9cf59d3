"""FLBoost in rounds under SIGKILL: server and actor may die in a refinement, and the bits are the same."""

from __future__ import annotations

import json
import os
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
    "method=iterative iterative.strategy=scaffold iterative.refiner=flboost iterative.rounds=5 iterative.fraction=0.5 "
    "iterative.checkpoint-every=2 flboost.iterations=15 flboost.generator-step=joint flboost.batch-size=16 "
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


def test_killed_in_a_refinement_and_in_a_round_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """The actor dies in a refinement, and the server in a later one, past the last checkpoint."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    status, expected = Command(RUN, whole).wait()
    assert status == 0
    nothing_left(whole)
    rounds = numbers(whole)

    first = Command(RUN, cut)
    os.kill(until_refinement(first, cut, 2), signal.SIGKILL)
    until_refinement(first, cut, 4)
    kill_simulation(cut)
    assert first.wait()[0] != 0
    nothing_left(cut)
    assert scored(cut) == 3
    assert "the Ray actor died; restart 1 of 2" in first.log.read_text()

    second = Command(["resume", str(run_folder(cut))], cut)
    status, result = second.wait()
    assert status == 0
    nothing_left(cut)
    assert result["resumed_at"] == 2
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["table"] == expected["table"]
    done = numbers(cut)
    # The bytes before a kill count too; all else is as in a run without faults.
    moved = {key for key in rounds[0] if key.startswith("mib_")}
    assert [{k: row[k] for k in row.keys() - moved} for row in done] == [
        {k: row[k] for k in row.keys() - moved} for row in rounds
    ]
    assert all(ours["mib_down"] >= theirs["mib_down"] for ours, theirs in zip(done, rounds, strict=True))
    assert "from zero" not in second.log.read_text()


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
