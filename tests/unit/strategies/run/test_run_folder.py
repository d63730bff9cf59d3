"""A run folder has one writer, is readable by all, and is whole whenever its writer dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from store_faults import names
from torch import nn

from strategies.core.durable import sha256_file, verify_digest
from strategies.core.errors import OptionError, StoreError
from strategies.core.facts import UploadFacts
from strategies.method import Job, Normalization, Snapshot
from strategies.methods.fedavg import FedAvgConfig
from strategies.run.files import FolderLock
from strategies.run.run_folder import RunFolder, default_run_dir, open_run

# Newer Pythons warn of a fork beside torch's threads; the children here only write files and die.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

STATE = {"w": torch.arange(3.0)}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {"method": "dense", "seed": 3})


def test_create_writes_the_run_s_identity_and_where_it_was_made(run: RunFolder) -> None:
    info = json.loads((run.path / "run.json").read_text())
    assert verify_digest(info) == run.info
    assert (info["method"], info["seed"], info["pid"]) == ("dense", 3, os.getpid())
    assert len(bytes.fromhex(run.id)) == 16
    # A registry's build for CUDA is 2.13.0 to the installer and 2.13.0+cu130 to itself.
    assert Version(info["versions"]["torch"]).public == Version(torch.__version__).public
    assert info["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_create_makes_its_folder_for_this_user_alone_and_leaves_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    for name in ("runs/own", "shared"):
        RunFolder.create(tmp_path / name, {}).close()

    made = (tmp_path / "runs" / "own", tmp_path / "shared")
    assert [oct(folder.stat().st_mode & 0o777) for folder in made] == ["0o700", "0o750"]


def test_create_over_a_run_says_to_resume_and_leaves_it(run: RunFolder) -> None:
    run.close()
    before = sha256_file(run.path / "run.json")
    with pytest.raises(StoreError, match="a run folder is here already; resume it"):
        RunFolder.create(run.path, {})
    assert sha256_file(run.path / "run.json") == before


@pytest.mark.parametrize("content", [None, "", '{"id": ', "[]", '{"method": "dense"}'])
def test_open_of_another_folder_is_one_line_with_its_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    for folder, write in ((tmp_path, True), (tmp_path / "absent", False)):
        with pytest.raises(StoreError, match=rf"{folder}.*(no run folder|damaged)"):
            RunFolder.open(folder, write=write)
    assert "lock" not in names(tmp_path)


def test_open_by_a_second_writer_fails_while_readers_may(run: RunFolder) -> None:
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        RunFolder.open(run.path)
    with RunFolder.open(run.path, write=False) as reader:
        assert reader.id == run.id
        with pytest.raises(StoreError, match="reading only"):
            reader.write_result({})
    run.close()
    with RunFolder.open(run.path) as again:
        assert again.info == run.info
    with pytest.raises(StoreError, match="reading only"):
        run.round().record({})


def test_open_after_a_killed_writer_removes_temporaries_and_repairs_lines(run: RunFolder) -> None:
    later = run.round(2)
    later.accept(UploadFacts("a", "x", 1), STATE)
    run.close()
    (later.path / "uploads" / ".b.safetensors.1.tmp").touch()
    with (later.path / "uploads.jsonl").open("ab") as file:
        file.write(b"\0\0\n")
    with RunFolder.open(run.path) as again:
        again.round(2).accept(UploadFacts("b", "x", 1), STATE)
        assert again.round(2).held() == ["a", "b"]
    assert names(later.path / "uploads") == ["a.safetensors", "b.safetensors"]


def test_round_one_is_the_run_folder_and_later_ones_are_below(run: RunFolder) -> None:
    assert run.round().path == run.path
    assert run.round(3).path == run.path / "round-3"
    assert run.round(3).held() == []
    assert not run.round(3).path.exists()
    run.round(3).accept(UploadFacts("a", "x", 1), STATE)
    run.round(3).save_checkpoint(Snapshot(1, {}))
    assert run.round(1).held() == []
    assert run.round(1).load_checkpoint() is None
    with pytest.raises(StoreError, match="round 0"):
        run.round(0)


def test_a_run_folder_that_is_closed_to_this_user_is_one_line(
    tmp_path: Path, close: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    close(closed)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)

    with pytest.raises(StoreError, match="closed: closed to this user"):
        RunFolder.open(closed)
    with pytest.raises(StoreError, match=f"{closed} is not a folder that can be written to"):
        default_run_dir(str(closed / "new"), "dense")


def test_lock_held_by_this_process_keeps_a_second_one_out_until_released(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(StoreError, match=rf"in use by process {os.getpid()}, call close\(\) of what opened it here"):
        FolderLock(tmp_path)
    first.release()
    first.release()
    assert not first.held
    second = FolderLock(tmp_path)
    assert second.held
    assert not first.held
    second.release()


@contextmanager
def forked(work: Callable[[], bool]) -> Iterator[int]:
    """Yield the id of a child that has done something, and lives to the end of the block."""
    heard, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(ready, b"1" if work() else b"0")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(heard, 1) == b"1"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(heard)
        os.close(ready)


def test_lock_after_a_fork_is_not_kept_by_the_child(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with forked(lambda: not lock.held):
        lock.release()
        FolderLock(tmp_path).release()


def test_lock_of_another_process_names_it_and_ends_with_it(tmp_path: Path) -> None:
    line = "in use by process {}, wait or end it"
    with forked(lambda: FolderLock(tmp_path).held) as pid, pytest.raises(StoreError, match=line.format(pid)):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()


# What a run's facts say of its model.


JOB = Job((), {"model": lambda: nn.Linear(4, 2)}, "model", 2, (4, 1, 1), Normalization((0.0,), (1.0,)), FedAvgConfig())


def opened(folder: Path, model: Callable[[], nn.Module]) -> dict[str, Any]:
    with open_run(folder, "fedavg", replace(JOB, builders={"model": model}), identity={}, facts={}) as run:
        return dict(run.info)


def test_open_run_refuses_another_model_of_the_same_name_in_one_line(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    begun = opened(tmp_path / "run", lambda: nn.Linear(4, 2))
    assert begun["student-tensors"].startswith("2 tensors, 10 numbers, ")
    assert torch.equal(torch.random.get_rng_state(), state)
    others = [lambda: nn.Linear(2, 4), lambda: nn.Linear(4, 2).double(), lambda: nn.Sequential(nn.Linear(4, 2))]
    for other in others:
        with pytest.raises(OptionError, match="student-tensors is '2 tensors, .* began with '2 tensors, "):
            opened(tmp_path / "run", other)
    assert opened(tmp_path / "run", lambda: nn.Linear(4, 2)) == begun
