"""The runs on this machine: their list, their names, and the word ``latest`` for the newest of them.

Only the small JSON files of the run folders are read, without torch, so that the list appears at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from server_app.launch.console import TableFormat
from strategies.core.errors import OptionError
from strategies.run import is_run_folder, runs_folder
from strategies.run.results import list_runs

LATEST = "latest"
COLUMNS = ("run", "created", "method", "data", "clients", "seed", "status", "accuracy")


def run_named(word: str) -> Path:
    """Return a run's folder.

    Args:
        word: A path; a run's name in the folder of the runs; or ``latest``, the newest run there that is no replay.

    Raises:
        OptionError: There is no run yet.
    """
    if word != LATEST:
        named = runs_folder() / word
        return named if is_run_folder(named) and not is_run_folder(Path(word)) else Path(word)
    found = [row for row in list_runs(runs_folder()) if row["kind"] != "replay"]
    if not found:
        raise OptionError(f"'{LATEST}' names no run: {runs_folder()} holds none")
    return runs_folder() / str(found[-1]["run"])


def print_runs(folder: Path, format: TableFormat) -> None:  # noqa: A002
    """Print the runs of a folder as a table, or as rows for a program."""
    from server_app.report.tables import csv_text, markdown_text, print_table

    rows = list_runs(folder)
    if format == "json":
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    if format == "csv":
        sys.stdout.write(csv_text(rows))
        return
    cells = [[_shown(row, column) for column in COLUMNS] for row in rows]
    notes = [f"{len(rows)} runs in {folder}" if len(rows) != 1 else f"1 run in {folder}"]
    if format == "md":
        sys.stdout.write(markdown_text(COLUMNS, cells, texts=4, notes=notes))
    else:
        print_table(COLUMNS, cells, texts=4, notes=notes, whole=1)  # a run's name is copied into the next command


def _shown(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "method" and row["kind"] != "run":
        return f"{value} ({row['kind']})"
    if value is None:
        return ""
    if column == "created":
        return str(value)[5:16].replace("T", " ")  # without the year, for the names of runs are long
    return f"{value:.2f}" if column == "accuracy" else str(value)
