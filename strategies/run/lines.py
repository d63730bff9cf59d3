"""Files of one JSON object per line that only grow, and survive a writer killed inside a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import StoreError
from .files import atomic_write, plain, sync_folder


@dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line.

    A line counts once its newline is written; a text after the last newline is a torn line and is never read.

    Attributes:
        path: The file; absent means no rows.
        strict: A damaged line before the last is an error; else it is left out.
    """

    path: Path
    strict: bool = True

    def append(self, row: Mapping[str, Any], *, sync: bool = True) -> None:
        """Add a row, or leave the file unchanged.

        Args:
            row: JSON values; see :func:`strategies.run.files.plain`.
            sync: Return only when the row is on the disk itself.

        Raises:
            OSError: The disk refuses.
        """
        line = json.dumps(plain(row), allow_nan=False).encode() + b"\n"
        with self.path.open("a+b", buffering=0) as file:
            end = _end_of_lines(file.read, file.seek)
            try:
                if sync and end == 0:
                    # The name first, so that a line whose write is reported as failed never stays.
                    sync_folder(self.path.parent)
                file.truncate(end)
                _write_all(file.write, line)
                if sync:
                    os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(end)
                raise

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows; a torn last line is left out.

        Raises:
            OSError: The file cannot be read.
            StoreError: A line before the last is damaged, and the file is strict.
        """
        return [row for row, _ in self._parsed()]

    def repair(self) -> None:
        """Cut off a damaged tail, which a crash of the machine may leave.

        Raises:
            OSError: The disk refuses.
        """
        if not self.path.exists():
            return
        parsed = self._parsed()
        end = parsed[-1][1] if parsed else 0
        if end < self.path.stat().st_size:
            with self.path.open("r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the rows that fail a test, atomically.

        Raises:
            OSError: The disk refuses; the file stays unchanged.
        """
        if self.path.exists():
            lines = [json.dumps(row).encode() + b"\n" for row in self.rows() if wanted(row)]
            atomic_write(self.path, b"".join(lines))

    def sync(self) -> None:
        """Bring rows appended without ``sync`` to the disk itself.

        Raises:
            OSError: The disk refuses.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _parsed(self) -> list[tuple[dict[str, Any], int]]:
        """Yield (row, offset of the end of its line) of each intact line."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        found, end = [], 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            row = _object(line)
            if row is not None:
                found.append((row, end))
            elif self.strict and number < len(lines):
                raise StoreError(f"{self.path}: line {number} is damaged, it should hold one JSON object")
        return found


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _end_of_lines(read: Callable[[int], bytes], seek: Callable[[int, int], int]) -> int:
    """Return the offset after the last newline of a file."""
    end = seek(0, os.SEEK_END)
    while end > 0:
        seek(end - 1, os.SEEK_SET)
        if read(1) == b"\n":
            break
        end -= 1
    return end


def _write_all(write: Callable[[bytes], int | None], data: bytes) -> None:
    """Write every byte: on a full disk, an unbuffered file takes a part and reports it only at the next call."""
    while data:
        data = data[write(data) or 0 :]
