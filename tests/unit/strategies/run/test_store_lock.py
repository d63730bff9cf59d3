"""One writer per folder, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from strategies.core.errors import StoreError
from strategies.run.files import FolderLock

# Newer Pythons warn of a fork beside torch's threads; the children here only write files and die.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def holder(folder: Path) -> int:
    """Return a process that holds the lock of a folder."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock = FolderLock(folder)
            os.write(writer, b"held" if lock.held else b"free")
            time.sleep(30)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 4) == b"held"
    os.close(reader)
    return child


def test_lock_held_by_another_process_fails_at_once_and_names_it_and_dies_with_it(tmp_path: Path) -> None:
    child = holder(tmp_path)
    try:
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            FolderLock(tmp_path)
        assert time.monotonic() - began < 1.0
        assert str(tmp_path) in str(caught.value)
        assert f"process {child}, wait or end it" in str(caught.value)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lock = FolderLock(tmp_path)
    assert lock.held
    lock.release()


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


def test_lock_after_a_fork_is_not_kept_by_the_child(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"1" if not lock.held else b"0")
        os.close(go[1])
        os.read(go[0], 1)  # until the parent closes its end
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"1"
        lock.release()
        FolderLock(tmp_path).release()
    finally:
        os.close(go[1])
        os.waitpid(pid, 0)
        for end in (*ready, go[0]):
            os.close(end)
