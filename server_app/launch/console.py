"""The output of the command line: log lines, and errors of one line. It loads no torch, so that help is instant."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TextIO

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from strategies.core import offline
from strategies.core.errors import OneShotError, printable
from strategies.run.journal import ProgressFile

WIDTH = 20  # of a bar


class Bar(Progress):
    """A bar on a terminal, with the state that a stage writes to a file; without a stage it shows nothing."""

    def __init__(self, file: ProgressFile, stream: TextIO) -> None:
        self._file = file  # first, because a Progress asks at once what to show
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
        super().__init__(
            BarColumn(WIDTH), text, console=Console(file=stream, force_terminal=True), refresh_per_second=4,
            transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._stage = self.add_task("", total=1.0)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar, as the file says."""
        if (state := self._file.read()) is not None:
            share, text = state
            self.update(self._stage, completed=share, description=printable(text))
            yield self.make_tasks_table(self.tasks)


_bars: list[Bar] = []  # the one that a terminal shows, if any


@contextmanager
def progress_bar(format: Format) -> Iterator[None]:  # noqa: A002
    """Show a bar while a block works, if the log goes to a terminal; lines of the log stand above it."""
    stream = _stream_of(format)
    if not stream.isatty() or _bars:
        yield
        return
    from server_app.launch.guard import guarded  # late: it loads psutil, and most commands show no bar

    with guarded(lambda: False) as (folder, _):  # the folder goes however this process ends
        path = folder / "progress.json"
        os.environ[ProgressFile.VARIABLE] = str(path)
        _bars.append(Bar(ProgressFile(path), stream))
        try:
            with _bars[0]:
                yield
        finally:
            _bars.clear()
            os.environ.pop(ProgressFile.VARIABLE, None)


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
    """Takes Flower's lines and yields the useful ones."""

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


def say(line: str, format: Format) -> None:  # noqa: A002
    """Print a line of the log; on a terminal, progress moves in one line, and control characters are written out."""
    _write("\n".join(map(printable, line.split("\n"))), format)


def _write(line: str, format: Format) -> None:  # noqa: A002
    if _bars:
        _bars[0].console.print(Text.from_ansi(line), soft_wrap=True)
        return
    stream = _stream_of(format)
    stream.write(line + "\n")
    stream.flush()


def _stream_of(format: Format) -> TextIO:  # noqa: A002
    # When a program reads standard output, only the result goes there.
    return sys.stderr if format == "json" else sys.stdout


def oneshot(*words: object) -> str:
    """Return one of our commands as a shell reads it, whatever the names of its folders; offline where this one is."""
    return shlex.join(["oneshot", *map(str, words), *(["--offline"] if offline.wanted() else [])])


def echo_to(format: Format) -> Callable[[str], None]:  # noqa: A002
    """Return the function that prints Flower's lines without noise."""
    lines = LogLines(colour=(sys.stderr if format == "json" else sys.stdout).isatty())

    def echo(line: str) -> None:
        for tidied in lines.take(line):
            _write(tidied, format)  # written out already, and coloured by us

    return echo


class errors:  # noqa: N801  reads as a statement: with errors(format)
    """Print an error as one line, also as JSON in that format, and exit with status 1.

    After Ctrl-C print "interrupted", or the text of the KeyboardInterrupt, and exit with 130.

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
            sys.stderr.write(f"{str(error) or 'interrupted'}\n")
            raise typer.Exit(130) from None  # as shells expect it
        return False


def _fail(reason: str, format: Format, facts: Mapping[str, Any]) -> NoReturn:  # noqa: A002
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    if format == "json":
        sys.stdout.write(json.dumps({"status": "failed", "error": reason, **facts}) + "\n")
        sys.stdout.flush()
    raise typer.Exit(1)
