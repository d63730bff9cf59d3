"""A disk that fills at any moment of a run: it ends with one line or goes on, and loses nothing that it accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flower_fakes import GRID, FakeGrid, dense, equal, weights
from flwr.app import ArrayRecord
from store_faults import Faults, disk_full

from strategies.core.errors import OneShotError
from strategies.run.files import JsonLines

START = ArrayRecord(weights(5))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """A disk on which a line of a file is a write, too."""
    faults = Faults(monkeypatch)
    monkeypatch.setattr(JsonLines, "append", faults.wrap(JsonLines.append))
    return faults


def result_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(dense(folder).start(FakeGrid(GRID), START).arrays.to_torch_state_dict())


def uploads_in(folder: Path) -> dict[str, str]:
    index = folder / "uploads.jsonl"
    lines = index.read_text().split("\n")[:-1] if index.exists() else []
    return {row["client"]: row["sha256"] for row in map(json.loads, lines)}


@pytest.mark.slow
def test_start_when_the_disk_fills_at_any_write_resumes_to_the_same_bits_with_every_accepted_upload(
    tmp_path: Path, disk: Faults
) -> None:
    whole = result_of(tmp_path / "whole")
    writes = disk.calls
    assert writes > 40
    ended, accepted_then = [], set()
    for room in range(0, writes, 8):  # a file takes three: each of them has its turn
        run = tmp_path / f"run-{room}"
        with disk.at(room, disk_full, last=10**9):
            try:
                result_of(run)
                ended.append("finished")
            except OneShotError as error:
                ended.append(str(error))
        accepted = uploads_in(run)
        accepted_then.add(len(accepted))
        assert equal(result_of(run), whole), f"after {room} writes"
        assert {client: sha for client, sha in uploads_in(run).items() if client in accepted} == accepted
        assert len(uploads_in(run)) == len(GRID)
    assert not any("\n" in line for line in ended)
    assert sum("No space left on device" in line or "disk full" in line for line in ended) > 3
    assert {0, len(GRID)} <= accepted_then
