"""The output of the command line: log lines, and errors of one line. It loads no torch, so that help is instant."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import typer

from server_app.launch.live_bar import bar_of
from server_app.launch.log_lines import LogLines
from strategies.core import offline
from strategies.core.errors import OneShotError, printable

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
