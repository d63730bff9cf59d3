"""FENS under faults: after SIGKILL it goes on, and in deployment a node may go and come back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from deployments import deployment
from test_faults import Command, rows, run_folder, uploads_in, written

pytestmark = [pytest.mark.slow, pytest.mark.ray]

CLIENTS, ROUNDS = 3, 30
SETTINGS = (
    f"method=fens client.epochs=2 fens.rounds={ROUNDS} fens.server-lr=0.05 fens.evaluate-every=1 checkpoint-s=0 "
    f"threads=1 min-uploads={CLIENTS}"
)
RUN = ["run", "--local", "--clients", str(CLIENTS), "--set", SETTINGS]
# With a patience of more than a round's time, so that only a node that is gone is not waited for.
DEPLOYED = (
    "method='fens' client.epochs=2 data.image-size=8 threads=1 deadline-s=150 fens.aggregator='per-class' "
    "fens.server-lr=0.1 fens.rounds=8 fens.local-steps=20 fens.evaluate-every=1 fens.patience-s=15.0"
)


def scored_rounds(run_dir: Path) -> list[dict[str, Any]]:
    """The scored rounds of a run folder."""
    return rows(run_dir / "metrics.jsonl")


def moved(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Phase -> way -> client -> bytes."""
    phases: dict[str, dict[str, dict[str, int]]] = json.loads((folder / "traffic.json").read_text())["phases"]
    return phases


def test_fens_killed_between_two_rounds_goes_on_where_it_was(tmp_path: Path) -> None:
    """That a cut has no effect on the bits is asked without processes, in test_fens.py."""
    first = Command(RUN, tmp_path)
    first.until(lambda: len(written(tmp_path, "metrics.jsonl")) >= 5)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait()[0] != 0
    assert len(first.trained()) == len(uploads_in(tmp_path)) == CLIENTS
    cut = len(written(tmp_path, "metrics.jsonl"))
    assert 5 <= cut < ROUNDS
    once = moved(run_folder(tmp_path))

    second = Command(["resume", str(run_folder(tmp_path)), "--local"], tmp_path)
    status, result = second.wait()
    assert status == 0
    assert second.trained() == set(), "a client trained twice"
    # A round's row is on disk before its checkpoint, so the kill may have come between the two.
    assert cut - 1 <= result["resumed_at"] <= cut
    assert [row["epoch"] for row in written(tmp_path, "metrics.jsonl")] == list(range(1, ROUNDS + 1))

    twice = moved(run_folder(tmp_path))
    assert twice["upload"] == once["upload"]
    # The ensemble was sent once, and that is on the account; a client that has its logits is only asked for them.
    for client, size in once["ensemble"]["down"].items():
        assert size <= twice["ensemble"]["down"][client] < 1.25 * size, client


def test_fens_goes_on_without_a_node_that_is_killed_and_with_it_when_it_is_back(tmp_path: Path) -> None:
    run_dir, beta = tmp_path / "run", 'partition-id=1 num-partitions=2 client="beta"'
    with deployment(tmp_path) as here:
        here.node("alpha", 'partition-id=0 num-partitions=2 client="alpha"')
        node = here.node("beta", beta)
        here.run(f"{DEPLOYED} run-dir='{run_dir}'")

        here.until(lambda: len(scored_rounds(run_dir)) >= 2)
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
        killed = len(scored_rounds(run_dir))
        here.until(lambda: any(row["clients"] == 1 for row in scored_rounds(run_dir)[killed:]))
        before, back = moved(run_dir), len(scored_rounds(run_dir))
        here.node("beta", beta)
        here.until((run_dir / "result.json").exists)
        logs = here.logs()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished", result
    assert result["refusals"] == []
    took_part = [row["clients"] for row in scored_rounds(run_dir)]
    assert 2 in took_part[:killed], logs
    assert 2 in took_part[back:], logs  # one answer per name: both
    after = moved(run_dir)
    assert after["aggregator"]["up"]["beta"] > before["aggregator"]["up"]["beta"]
    # Under the same name it finds the logits on its disk.
    assert after["ensemble"] == before["ensemble"]
    assert logs.count("epoch 1 of") <= 2, "a client trained twice"
