"""The runs on this machine: their list, their names, and the word ``latest`` for the newest of them.

Only the small JSON files of the run folders are read, without torch, so that the list appears at once.
"""

from __future__ import annotations

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
    from server_app.report.tables import Table, write_out

    rows = list_runs(folder)

    def table() -> Table:
        heading = f"{len(rows)} run{'s' * (len(rows) != 1)} in {folder}"
        return Table(heading, COLUMNS, [[_shown(row, column) for column in COLUMNS] for row in rows], texts=4)

    if format == "text":
        table().print(whole=1)  # a run's name is copied into the next command
    else:
        write_out(table, format, facts=rows, rows=lambda: rows)


def _shown(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "method" and row["kind"] != "run":
        return f"{value} ({row['kind']})"
    if value is None:
        return ""
    if column == "created":
        return str(value)[5:16].replace("T", " ")  # without the year, for the names of runs are long
    return f"{value:.2f}" if column == "accuracy" else str(value)
