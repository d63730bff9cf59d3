"""The runs on this machine: their list, and the word ``latest`` for the newest of them.

Only the small JSON files of the run folders are read, without torch, so that the list appears at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from server_app.launch.console import TableFormat
from strategies.core.errors import OptionError
from strategies.run import runs_folder

LATEST = "latest"
COLUMNS = ("run", "created", "method", "data", "clients", "seed", "status", "accuracy")


def run_named(word: str) -> Path:
    """Return a run's folder; ``latest`` is the newest run of this machine's folder that is no replay.

    Raises:
        OptionError: There is no run yet.
    """
    if word != LATEST:
        return Path(word)
    found = [row for row in list_runs(runs_folder()) if row["kind"] != "replay"]
    if not found:
        raise OptionError(f"'{LATEST}' names no run: {runs_folder()} holds none")
    return runs_folder() / str(found[-1]["run"])


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of the runs in a folder, oldest first.

    Args:
        folder: The parent of the run folders; it need not exist.

    Returns:
        A row per run: its folder's name, the time of its creation, kind, method, data set, number of clients, seed,
        status and accuracy in % or None. A kind is run, replay or import; a status finished, failed or unfinished.
    """
    rows = [row for path in folder.glob("*/run.json") if (row := _row(path.parent)) is not None]
    return sorted(rows, key=lambda row: (str(row["created"]), str(row["run"])))


def _row(run: Path) -> dict[str, Any] | None:
    info = _read(run / "run.json")
    if info is None:
        return None
    result, settings = _read(run / "result.json") or {}, info.get("settings") or {}
    kind = "replay" if info.get("replay-of") else "import" if info.get("imported-from") else "run"
    return {
        "run": run.name,
        "created": str(info.get("created", "")),
        "kind": kind,
        "method": info.get("method", ""),
        "data": settings.get("data.name", ""),
        "clients": result.get("uploads", info.get("num-supernodes")),
        "seed": info.get("seed"),
        "status": result.get("status", "unfinished"),
        "accuracy": result.get("accuracy"),
    }


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that is being written or is damaged; the command that opens it says so
        return None
    return found if isinstance(found, dict) else None


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
        print_table(COLUMNS, cells, texts=4, notes=notes)


def _shown(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "method" and row["kind"] != "run":
        return f"{value} ({row['kind']})"
    if value is None:
        return ""
    if column == "created":
        return str(value)[:16].replace("T", " ")
    return f"{value:.2f}" if column == "accuracy" else str(value)
