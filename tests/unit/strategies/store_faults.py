"""Faults of the disk at a chosen call of ``os.fsync`` or ``os.replace``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Fail = Callable[[], None]


class Faults:
    """Counts the calls that make a write durable, and fails at one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fail_at = range(0)
        self.fail: Fail = disk_full
        for name in ("fsync", "replace"):
            patch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real: Callable[..., None]) -> Callable[..., None]:
        """Return a function whose calls count, and fail in their turn."""

        def call(*args: object, **kwargs: object) -> None:
            self.calls += 1
            if self.calls - 1 in self.fail_at:
                self.fail()
            real(*args, **kwargs)

        return call

    @contextmanager
    def at(self, index: int, fail: Fail, last: int | None = None) -> Iterator[None]:
        """Within the block, call ``fail`` before the call number ``index`` (from 0), or those to ``last``, work."""
        self.calls, self.fail_at, self.fail = 0, range(index, (index if last is None else last) + 1), fail
        try:
            yield
        finally:
            self.fail_at = range(0)

    def count(self, action: Callable[[], object]) -> int:
        """Return how many such calls an action makes."""
        with self.at(-1, disk_full):
            action()
            return self.calls


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())
