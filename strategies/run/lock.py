"""One writer per run folder: a lock of the operating system, which ends with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..core.errors import StoreError

LOCK_NAME = "lock"

_locks: set[FolderLock] = set()


def _drop_inherited() -> None:
    # A forked child shares the lock; a child that outlived its parent would lock out every other process.
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)


class FolderLock:
    """The right to write to a folder, from construction to :meth:`release`.

    Args:
        folder: The folder; it must exist.

    Raises:
        StoreError: Another process holds it (the error names its id), or the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"{folder}: run folder is not writable ({error.strerror})") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        except OSError as error:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            if isinstance(error, BlockingIOError):
                remedy = "call close() of what opened it here" if holder == str(os.getpid()) else "wait or end it"
                raise StoreError(f"{folder}: run folder is in use by process {holder}, {remedy}") from error
            raise StoreError(f"{path}: cannot lock the run folder ({error.strerror})") from error
        _locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock."""
        return self in _locks

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.held:
            _locks.remove(self)
            os.close(self._handle)
