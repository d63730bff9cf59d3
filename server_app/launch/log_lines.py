"""Removes the noise from Flower's and Ray's log lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from strategies.core.errors import OneShotError, printable

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "(ClientAppActor pid=18588) ": the process that simulated a client is of no use to the reader, and always changes.
ACTOR = re.compile(r"^\(\w+ pid=\d+(, ip=[\d.]+)?\)\s*")
LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR)\s*:\s*")
# Flower's advice on its own command line, and its closing messages.
NOISE = (
    "Using SuperLink: ",
    "Starting logstream for run_id",
    "Successfully installed ",
    "default simulated SuperNodes changed",
    "To change federation size",
    "flwr federation simulation-config",
    "Manually terminating ClientAppActor",
    "Start `flwr-simulation` process",
    "Simulation raised an exception",
    "Exit Code: 700",
    "An unhandled exception occurred when running the simulation",
    "flower.ai/docs/framework",
    "Tip: In future versions of Ray",
    "warnings.warn(",
)
# This project's errors are complete in one line, which is printed at the end, so their traceback is dropped.
OURS = re.compile(rf"^{re.escape(OneShotError.__module__)}\.\w+: ")
TRACEBACK = "Traceback (most recent call last):"


class LogLines:
    """Takes Flower's lines and yields the useful ones.

    Args:
        colour: Whether the reader's terminal shows colours.
    """

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._traceback: list[str] = []

    def take(self, line: str) -> Iterator[str]:
        """Yield the lines to print now: none, the line without process ids and decoration, or a whole traceback.

        A traceback is held back until its last line shows whether the error is one of this project's.
        """
        plain = printable(ACTOR.sub("", ANSI.sub("", line.rstrip())).expandtabs())
        if plain.startswith(TRACEBACK):
            yield from self.rest()
            self._traceback = [plain]
        elif self._traceback and (not plain or plain[0] in " ^"):
            self._traceback.append(plain)
        elif self._traceback:
            held, self._traceback = self._traceback, []
            if not OURS.match(plain):
                yield from [*held, plain]
        elif (tidied := self._tidy(plain)) is not None:
            yield tidied

    def rest(self) -> Iterator[str]:
        """Yield the lines that are still held back."""
        held, self._traceback = self._traceback, []
        yield from held

    def _tidy(self, plain: str) -> str | None:
        level = LEVEL.match(plain)
        text = LEVEL.sub("", plain)
        if not text.strip() or any(part in text for part in NOISE):
            return None
        if level is None or level[1] == "INFO":
            return text
        return f"\x1b[33m{level[1]}\x1b[0m {text}" if self._colour else f"{level[1]} {text}"
