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
from server_app.report.client_scores import chosen_of, client_lines, missing_lines, results_table, summary_line
from server_app.report.communication import moved_lines
from server_app.report.gatekeeping import attack_lines
from server_app.report.page import PAGE_FILE
from server_app.report.tables import (
    headline,
    headline_cells,
    refusal_lines,
    scale_of,
    scored_on,
    titled,
    unscored_lines,
    worded,
)
from server_app.settings.read import scaled_line
from strategies.core.errors import printable
from strategies.core.facts import HEADLINES


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
    metric = result.get("metric", "accuracy")
    table.add_column(titled(metric), justify="right")
    table.add_column("95 % interval", justify="right")
    for row in _summarised(result["table"], metric):
        table.add_row(printable(row["name"]), printable(row["kind"]), *headline_cells(row, metric))
    if result["table"]:
        # A separate line, because a table's title would be wrapped to the table's width.
        console.print(
            f"{worded(metric)} on {scored_on(result)} ({result['method']}, seed {result['seed']})",
            highlight=False,
        )
        console.print(table)
    for line in [*unscored_lines(result), *(client_lines(result["evaluation"]) if "evaluation" in result else ())]:
        console.print(printable(line), highlight=False, soft_wrap=True)
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


def print_evaluations(results: Sequence[Mapping[str, Any]], format: Format) -> None:  # noqa: A002
    """Print the clients' scores of results: of one result each client's, of several a table; or a line of JSON."""
    sys.stderr.flush()
    if format == "json":
        kept = ("run_dir", "method", "seed", "evaluation")
        shown = [{key: each[key] for key in kept} for each in results]
        sys.stdout.write(json.dumps({"results": shown, "chosen": chosen_of(results)}) + "\n")
        return
    results_table(results).print()
    console = Console(markup=False, emoji=False)
    lines = list[str]()
    for result in results:
        facts = result["evaluation"]
        if len(results) == 1:
            lines += client_lines(facts)
        elif summary := summary_line(facts):
            lines.append(f"{result['method']}: {summary}")
        lines.append(f"page  {result['run_dir']}/{PAGE_FILE}")
    lines += missing_lines(results[0]["evaluation"]) if len(results) > 1 else []  # the same of all results
    for line in lines:
        console.print(printable(line), highlight=False, soft_wrap=True)


def _summarised(table: Sequence[Mapping[str, Any]], metric: str) -> list[Mapping[str, Any]]:
    """Return the rows to print: of more than two clients the best one and their mean."""
    clients = [row for row in table if row["kind"] == "client"]
    found = [value for row in clients if (value := headline(row, metric)) is not None]
    if len(clients) <= 2 or not found:
        return list(table)
    best = min(found) if metric == "log-loss" else max(found)
    # Of a score of the user's own it is not known whether more is better.
    rows = [(f"best of {len(clients)} clients", best)] if metric in HEADLINES else []
    rows.append((f"mean of {len(clients)} clients", fmean(found)))
    return [*(_row(name, metric, value) for name, value in rows), *(row for row in table if row["kind"] != "client")]


def _row(name: str, metric: str, value: float) -> dict[str, Any]:
    scores = {metric: {"value": value / scale_of(metric)}}
    return {"name": name, "kind": "client", "accuracy": value, "scores": scores}
