"""The result of a run, as the command line prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from server_app.launch.console import Format
from server_app.report.communication import moved_lines
from server_app.report.gatekeeping import attack_lines
from server_app.report.tables import refusal_lines
from server_app.settings.read import scaled_line
from strategies.core.errors import printable


def print_result(result: Mapping[str, Any], format: Format) -> None:  # noqa: A002
    """Print a result as a table, or as one line of JSON, the last of the output."""
    if format == "json":
        sys.stderr.flush()
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        return
    console = Console(markup=False, emoji=False)  # texts of clients are printed literally
    table = Table()
    table.add_column("model")
    table.add_column("kind")
    table.add_column("accuracy, %", justify="right")
    for row in _summarised(result["table"]):
        table.add_row(printable(row["name"]), printable(row["kind"]), f"{row['accuracy']:.2f}")
    if result["table"]:
        # A separate line, because a table's title would be wrapped to the table's width.
        console.print(f"accuracy on held-out examples ({result['method']}, seed {result['seed']})", highlight=False)
        console.print(table)
    # Clients that answer round by round upload nothing.
    counted = result["uploads"] or result["refused"]
    lines = [f"uploads      {result['uploads']} accepted, {result['refused']} refused"] if counted else []
    lines += [f"             {line}" for line in refusal_lines(result["refusals"])]
    lines += [f"{'' if number else 'moved':<13}{line}" for number, line in enumerate(moved_lines(result))]
    lines += [f"attack       {line}" for line in attack_lines(result.get("attack", {}))]
    lines += [f"privacy      {result['privacy']['described']}"] if "privacy" in result else []
    if "scaled" in result:
        lines.append(f"scaled       {scaled_line(result['scaled'])}")
    lines.append("seconds      " + ", ".join(f"{phase} {value:.1f}" for phase, value in result["seconds"].items()))
    lines.append(f"run folder   {result['run_dir']}")
    for line in lines:
        console.print(printable(line), highlight=False, soft_wrap=True)


def _summarised(table: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows to print: of more than two clients the best one and their mean."""
    clients = [row for row in table if row["kind"] == "client"]
    if len(clients) <= 2:
        return list(table)
    found = [row["accuracy"] for row in clients]
    best = {"name": f"best of {len(clients)} clients", "kind": "client", "accuracy": max(found)}
    mean = {"name": f"mean of {len(clients)} clients", "kind": "client", "accuracy": fmean(found)}
    return [best, mean, *(row for row in table if row["kind"] != "client")]
