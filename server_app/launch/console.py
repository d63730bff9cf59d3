"""The output of the command line: log lines, and errors of one line. It loads no torch, so that help is instant."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn, TextIO

import typer

from strategies.core import offline
from strategies.core.errors import OneShotError, printable

# Progress on a terminal: one line with a bar, which the next progress replaces.


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


# Removes the noise from Flower's and Ray's log lines.


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


Format = Literal["text", "json"]
TableFormat = Literal["text", "json", "csv", "md"]
INTERRUPTED = 130  # exit status after Ctrl-C, as shells expect it


def say(line: str, format: Format) -> None:  # noqa: A002
    """Print a line of the log; on a terminal, progress moves in one line, and control characters are written out."""
    _write("\n".join(map(printable, line.split("\n"))), format)


def _write(line: str, format: Format) -> None:  # noqa: A002
    # When a program reads standard output, only the result goes there.
    stream = sys.stderr if format == "json" else sys.stdout
    stream.write(bar_of(stream).shown(line) if stream.isatty() else line + "\n")
    stream.flush()


def oneshot(*words: object) -> str:
    """Return one of our commands as a shell reads it, whatever the names of its folders; offline where this one is."""
    return shlex.join(["oneshot", *map(str, words), *(["--offline"] if offline.wanted() else [])])


def end_bars() -> None:
    """Remove a bar under way from the terminal, before output that is no line of the log."""
    for stream in (sys.stdout, sys.stderr):
        stream.write(bar_of(stream).closed())
        stream.flush()


def echo_to(format: Format) -> Callable[[str], None]:  # noqa: A002
    """Return the function that prints Flower's lines without noise."""
    lines = LogLines(colour=(sys.stderr if format == "json" else sys.stdout).isatty())

    def echo(line: str) -> None:
        for tidied in lines.take(line):
            _write(tidied, format)  # written out already, and coloured by us

    return echo


class errors:  # noqa: N801  reads as a statement: with errors(format)
    """Print an error as one line, also as JSON in that format, and exit with status 1; with 130 after Ctrl-C.

    Attributes:
        facts: Further fields of the JSON, for example the run folder to resume.
    """

    def __init__(self, format: Format) -> None:  # noqa: A002
        self.format = format
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> errors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        if isinstance(error, OneShotError):
            _fail(str(error), self.format, self.facts)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        return False


def _fail(reason: str, format: Format, facts: Mapping[str, Any]) -> NoReturn:  # noqa: A002
    end_bars()
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    if format == "json":
        sys.stdout.write(json.dumps({"status": "failed", "error": reason, **facts}) + "\n")
        sys.stdout.flush()
    raise typer.Exit(1)
