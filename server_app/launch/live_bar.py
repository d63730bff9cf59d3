"""Progress on a terminal: one line with a bar, which the next progress replaces."""

from __future__ import annotations

import functools
import re
import shutil
from typing import TextIO

from strategies.core.errors import printable

# "tally: epoch 3 of 12, ..., about 30 s left": the lines of a stage under way; its last line stays.
PROGRESS = re.compile(r"^[\w-]+: \w+ (\d+) of (\d+)(?:, step (\d+) of (\d+))?")
CLEAR = "\r\x1b[K"
WIDTH = 20


class LiveBar:
    """Turns lines into what a terminal gets: progress in place, every other line below the last."""

    def __init__(self) -> None:
        self._open = False  # the last line of the terminal is a bar

    def shown(self, line: str) -> str:
        """Return the characters to write for a line."""
        before, found = CLEAR if self._open else "", PROGRESS.match(line)
        self._open = found is not None and int(found[1]) < int(found[2])
        if found is None or not self._open:
            return f"{before}{line}\n"
        done, total = int(found[1]), int(found[2])
        part = int(found[3]) / int(found[4]) if found[3] else 0.0
        filled = int(WIDTH * (done + part) / total)
        text = f"{'█' * filled}{'░' * (WIDTH - filled)} {printable(line)}"
        return f"{before or CLEAR}{text[: shutil.get_terminal_size().columns - 1]}"

    def closed(self) -> str:
        """Return the characters that end an open bar, before other output."""
        was, self._open = self._open, False
        return CLEAR if was else ""


@functools.cache
def bar_of(stream: TextIO) -> LiveBar:  # noqa: ARG001  one for each
    """Return the bar of a stream."""
    return LiveBar()
