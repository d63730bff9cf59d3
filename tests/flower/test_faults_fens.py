"""FENS under faults: after SIGKILL it goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from test_faults import Command, run_folder, uploads_in, written

pytestmark = pytest.mark.slow

CLIENTS, ROUNDS = 3, 30
SETTINGS = (
    f"method=fens client.epochs=2 fens.rounds={ROUNDS} fens.server-lr=0.05 fens.evaluate-every=1 checkpoint-s=0 "
    f"threads=1 min-uploads={CLIENTS}"
)
RUN = ["run", "--local", "--clients", str(CLIENTS), "--set", SETTINGS]


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
