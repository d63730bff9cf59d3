"""What outlives a process: a run that was cut off goes on, a finished one is read, and a stored one is replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import (
    GRID,
    TINY,
    FakeGrid,
    KilledError,
    dense,
    equal,
    linear,
    lines_of,
    named,
    net,
    stock,
    strategy,
    weights,
)
from flwr.app import ArrayRecord

from strategies import DenseConfig, FedENS, Normalization, OneShot, RunOptions
from strategies.core.errors import OptionError, StoreError
from strategies.core.facts import UploadFacts
from strategies.method import Snapshot
from strategies.run.checkpoint import CheckpointFolder
from strategies.run.files import read_weights, save_weights, write_json
from strategies.run.run_folder import RunFolder

START = ArrayRecord(weights(5))


@contextmanager
def killed(step: int = 1) -> Iterator[None]:
    """End the process, as it were, right after the checkpoint of a step."""
    save = CheckpointFolder.save

    def save_and_die(self: CheckpointFolder, snapshot: Snapshot) -> None:
        save(self, snapshot)
        if snapshot.step == step:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", save_and_die)
        with pytest.raises(KilledError):
            yield


def result_of(found: OneShot, grid: FakeGrid | None = None) -> dict[str, torch.Tensor]:
    return dict(found.start(grid or FakeGrid(GRID), START).arrays.to_torch_state_dict())


@pytest.mark.parametrize("kind", ["named", "stock"])
def test_start_when_the_server_stage_was_cut_off_asks_no_client_and_ends_with_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    clients = GRID if kind == "named" else {1: stock(1), 2: stock(2)}
    whole = result_of(dense(tmp_path / "whole"), FakeGrid(clients))
    with killed():
        dense(tmp_path / "run").start(FakeGrid(clients), START)
    grid = FakeGrid(clients)
    found = dense(tmp_path / "run")
    assert equal(result_of(found, grid), whole)
    assert grid.asked == []
    assert found.report.resumed_at == 1
    assert [row["epoch"] for row in lines_of(tmp_path / "run", "metrics") if "epoch" in row] == [1, 2]


def test_start_when_the_run_is_finished_reads_its_result(tmp_path: Path, said: list[str]) -> None:
    whole = result_of(dense(tmp_path / "run"))
    stored = (tmp_path / "run" / "outcome.json").read_bytes()
    grid, calls = FakeGrid(GRID), []
    found = dense(tmp_path / "run")
    result = found.start(grid, START, evaluate_fn=lambda number, _: calls.append(number))
    assert equal(dict(result.arrays.to_torch_state_dict()), whole)
    assert equal(dict(found.outcome.state_dict()), whole)
    assert grid.asked == []
    assert calls == [0, 1]
    assert (tmp_path / "run" / "outcome.json").read_bytes() == stored
    assert "round 1 of 1 is finished: its result is read from the run folder" in said


def test_start_when_an_upload_came_late_leaves_it_out_also_after_a_resume(tmp_path: Path) -> None:
    late = FakeGrid({**GRID, 3: named("carol", 3)}, delays={3: 30})
    with killed():
        dense(tmp_path / "run").start(late, START, timeout=1.0)
    with RunFolder.open(tmp_path / "run") as run:
        if "carol" not in run.round(1).held():
            run.round(1).accept(UploadFacts("carol", "model", 1), weights(3))
    found = dense(tmp_path / "run")
    resumed = result_of(found)
    assert [upload.client for upload in found.report.job.uploads] == ["alice", "bob"]
    assert equal(resumed, result_of(dense(tmp_path / "whole")))
    again = dense(tmp_path / "run")
    again.start(FakeGrid({}), START)
    assert [upload.client for upload in again.report.job.uploads] == ["alice", "bob"]
    # For a replay it is there.
    replayed = strategy(FedENS, None).replay(tmp_path / "run", target=tmp_path / "replay")
    assert len(replayed.members) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options": RunOptions(teacher="tally")}, "teacher is 'tally', but the run in .* began with 'method': resume"),
        ({"seed": 1}, "seed is 1, but the run in .* began with 0: resume with the same settings, or name another"),
        ({"config": DenseConfig(**{**TINY, "epochs": 3})}, "epochs is 3, but the run in .* began with 2: resume"),
        ({"model": {"net": net}}, "student is 'net', but the run in .* began with 'model': resume"),
        ({"model": linear}, "student-tensors is '2 tensors, 260 numbers, .*, but the run in .* began with '9 tensors"),
        (
            {"normalization": Normalization((0.4,), (0.5,))},
            r"normalization is \[\[0.4\], \[0.5\]\], but the run in .* began",
        ),
    ],
)
def test_start_when_the_folder_is_of_another_run_refuses(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    result_of(dense(tmp_path / "run"))
    with pytest.raises(OptionError, match=reason):
        dense(tmp_path / "run", **changes).start(FakeGrid(GRID))
    with pytest.raises(OptionError, match="method is 'fedens', but the run in .* began with 'dense'"):
        strategy(FedENS, tmp_path / "run").start(FakeGrid(GRID))
    assert len(dense(tmp_path / "run").start(FakeGrid({})).arrays) > 0


def test_start_when_a_damaged_upload_was_taken_out_asks_its_client_and_begins_the_stage_anew(tmp_path: Path) -> None:
    whole = dict(dense(tmp_path / "whole").start(FakeGrid(GRID)).arrays.to_torch_state_dict())
    with killed():
        dense(tmp_path / "run").start(FakeGrid(GRID))
    (tmp_path / "run" / "uploads" / "bob.safetensors").write_bytes(b"torn")
    with pytest.raises(StoreError, match="damaged upload of client 'bob'.* remove its line from uploads.jsonl"):
        dense(tmp_path / "run").start(FakeGrid(GRID))
    index = tmp_path / "run" / "uploads.jsonl"
    index.write_text("".join(line for line in index.read_text().splitlines(True) if "bob" not in line))
    work: list[str] = []
    found = dense(tmp_path / "run")
    result = found.start(FakeGrid({1: named("alice", 1, work=work), 2: named("bob", 2, work=work)}))
    assert work == ["bob"]
    assert found.report.resumed_at == 0
    assert equal(dict(result.arrays.to_torch_state_dict()), whole)


def test_replay_without_clients_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = dict(dense(tmp_path / "run").start(FakeGrid(GRID)).arrays.to_torch_state_dict())
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    found = dense(None)
    model = found.replay(tmp_path / "run")
    assert equal(dict(model.state_dict()), whole)
    assert equal(dict(found.outcome.state_dict()), whole)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    (target,) = (path for path in tmp_path.iterdir() if path.name != "run")
    info = json.loads((target / "run.json").read_text())
    assert info["replay-of"] == str(tmp_path / "run")
    assert (target / "student.safetensors").exists()


TWO_ROUNDS = DenseConfig(rounds=2, **TINY)


def test_start_when_a_crash_split_the_second_rounds_outcome_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = result_of(dense(tmp_path / "whole", config=TWO_ROUNDS))
    for wanted in ({"round": 2}, None):  # before round 2's facts are written; after, before the student's copy
        run = tmp_path / f"run-{wanted is None}"

        def write(path: Path, value: Any, wanted: Any = wanted) -> None:
            if wanted is not None and value.get("round") == wanted["round"]:
                raise KilledError
            write_json(path, value)

        def save(path: Path, state: Any, run: Path = run, wanted: Any = wanted) -> None:
            if wanted is None and path.parent == run and (run / "round-2" / path.name).exists():
                raise KilledError
            save_weights(path, state)

        with monkeypatch.context() as crash:
            crash.setattr("strategies.run.stage.write_json", write)
            crash.setattr("strategies.run.stage.save_weights", save)
            with pytest.raises(KilledError):
                dense(run, config=TWO_ROUNDS).start(FakeGrid(GRID), START)
        grid = FakeGrid(GRID)
        assert equal(result_of(dense(run, config=TWO_ROUNDS), grid), whole)
        assert grid.asked == []
        assert equal(read_weights(run / "student.safetensors"), whole)
