"""The output of the command line: log lines, the result, and errors of one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from server_app.launch.log_lines import LogLines
from server_app.report.attack_success import attack_lines
from server_app.report.communication import moved_lines
from server_app.settings.read import scaled_line
from strategies.core.errors import OneShotError

Format = Literal["text", "json"]


def print_result(result: Mapping[str, Any], format: Format) -> None:  # noqa: A002
    """Print a result as a table, or as one line of JSON, the last of the output."""
    if format == "json":
        sys.stderr.flush()
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        return
    console = Console(markup=False)  # texts of clients are printed literally
    table = Table()
    table.add_column("model")
    table.add_column("kind")
    table.add_column("accuracy, %", justify="right")
    for row in result["table"]:
        table.add_row(row["name"], row["kind"], f"{row['accuracy']:.2f}")
    if result["table"]:
        # A separate line, because a table's title would be wrapped to the table's width.
        console.print(f"accuracy on held-out images ({result['method']}, seed {result['seed']})", highlight=False)
        console.print(table)
    # Clients that answer round by round upload nothing.
    counted = result["uploads"] or result["refused"]
    lines = [f"uploads      {result['uploads']} accepted, {result['refused']} refused"] if counted else []
    lines += [f"             {entry['client']}: {entry['reason']}" for entry in result["refusals"]]
    lines += [f"{'' if number else 'moved':<13}{line}" for number, line in enumerate(moved_lines(result))]
    lines += [f"attack       {line}" for line in attack_lines(result.get("attack", {}))]
    lines += [f"privacy      {result['privacy']['described']}"] if "privacy" in result else []
    if "scaled" in result:
        lines.append(f"scaled       {scaled_line(result['scaled'])}")
    lines.append("seconds      " + ", ".join(f"{phase} {value:.1f}" for phase, value in result["seconds"].items()))
    lines.append(f"run folder   {result['run_dir']}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def say(line: str, format: Format) -> None:  # noqa: A002
    """Print a line of the log."""
    # When a program reads standard output, only the result goes there.
    stream = sys.stderr if format == "json" else sys.stdout
    stream.write(line + "\n")
    stream.flush()


def echo_to(format: Format) -> Callable[[str], None]:  # noqa: A002
    """Return the function that prints Flower's lines without noise."""
    lines = LogLines(colour=(sys.stderr if format == "json" else sys.stdout).isatty())

    def echo(line: str) -> None:
        for tidied in lines.take(line):
            say(tidied, format)

    return echo


class errors:  # noqa: N801  reads as a statement: with errors(format)
    """Print an error as one line, also as JSON in that format, and exit with status 1.

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
        return False


def _fail(reason: str, format: Format, facts: Mapping[str, Any]) -> NoReturn:  # noqa: A002
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    if format == "json":
        sys.stdout.write(json.dumps({"status": "failed", "error": reason, **facts}) + "\n")
        sys.stdout.flush()
    raise typer.Exit(1)
