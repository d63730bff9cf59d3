"""Files of one JSON object per line that only grow, and survive a writer killed inside a line.

Every line carries its digest. A line that was cut off lacks its end or holds zeros; it was never reported as written,
and is left out. Any other line that differs from its digest is damaged, which is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.durable import DIGEST, atomic_write, sealed, sync_folder, unsealed
from ..core.errors import StoreError
from .files import plain


@dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line.

    A line counts once its newline is written; a text after the last newline is a torn line and is never read.

    Attributes:
        path: The file; absent means no rows.
        strict: A cut-off line before the last is an error; else it is left out.
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
        line = json.dumps(sealed(plain(row)), allow_nan=False).encode() + b"\n"
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
            StoreError: A line is damaged; or one before the last is cut off, and the file is strict.
        """
        return [row for row, _, _ in self._parsed()]

    def repair(self) -> None:
        """Cut off a damaged tail, which a crash of the machine may leave.

        Raises:
            OSError: The disk refuses.
            StoreError: A line is damaged; or one before the last is cut off, and the file is strict.
        """
        if not self.path.exists():
            return
        parsed = self._parsed()
        end = parsed[-1][2] if parsed else 0
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
            lines = [line + b"\n" for row, line, _ in self._parsed() if wanted(row)]
            atomic_write(self.path, b"".join(lines))

    def sync(self) -> None:
        """Bring rows appended without ``sync`` to the disk itself.

        Raises:
            OSError: The disk refuses.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _parsed(self) -> list[tuple[dict[str, Any], bytes, int]]:
        """Return (row, its line, offset of the end of the line) of each intact line."""
        if not self.path.exists():
            return []
        *lines, tail = self.path.read_bytes().split(b"\n")
        found, end = [], 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            row = row_of(line)
            if row is not None:
                found.append((row, line, end))
            elif _was_finished(line) or (self.strict and number < len(lines)):
                raise StoreError(f"{self.path}: line {number} is damaged: must be one JSON object with its digest")
        if row_of(tail[:-1]) is not None:  # its newline was changed into another byte
            raise StoreError(f"{self.path}: line {len(lines) + 1} is damaged: must end with a newline")
        return found


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line without its newline; None if it is cut off or damaged."""
    try:
        row = json.loads(line)
        return unsealed(row) if isinstance(row, dict) else None
    except (ValueError, RecursionError):
        return None


def _was_finished(line: bytes) -> bool:
    """Return whether a line that cannot be read was whole once; the blocks that a power cut leaves out are zeros."""
    cut = line.startswith(b"\0") or b"\0\0" in line
    return not cut and (DIGEST.encode() in line or line.endswith(b'"}'))


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
