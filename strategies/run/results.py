"""The results on a machine: the list of its runs, and a table of runs and comparisons for pandas.

Only the small JSON files of the folders are read, so a list appears at once; pandas is loaded for the table alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.durable import TEMPORARY_PATTERN
from ..core.options import named_as_today
from . import FACTS_FILE, RESULT_FILE, runs_folder

if TYPE_CHECKING:
    import pandas as pd

COMPARISON_FILE = "compare.json"
# What the code and the clients of a Flower project scored, by the parts of Flower's Result; a finished run has it.
SCORES_FILE = "flower_result.json"
COLUMNS = (
    "run", "created", "kind", "method", "result", "data", "partition", "alpha", "clients", "seed", "status", "accuracy",
    "best_accuracy", "server_s", "mib_per_client", "weights_sha256", "comparison",
)  # fmt: skip


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of the runs in a folder, oldest first.

    Args:
        folder: The parent of the run folders; it need not exist.

    Returns:
        A row per run: its folder's name, the time of its creation, kind, method, data set, number of clients, seed,
        status and accuracy in % or None. A kind is run, replay or import; a status finished, failed, unfinished
        or imported.
    """
    return sorted((_row(run, *found) for run, found in _runs(folder)), key=_begun)


def results(folder: str | Path = "") -> pd.DataFrame:
    """Return the results of runs, replays and comparisons as a table, a row for each result.

    A run or replay has one row, that of its method's own result. A method of a comparison has a row for each run, seed
    and result (ensemble and student), of kind ``"comparison"``. For means over seeds, group the rows.

    Args:
        folder: The parent of the run folders; empty for ``$ONESHOT_RUNS``, else ``runs``.

    Returns:
        The columns :data:`COLUMNS`, oldest first; a value that a run does not have is missing. ``accuracy`` is in %,
        ``server_s`` the seconds of the server stage, ``mib_per_client`` what a client sent and received.
    """
    import pandas as pd

    place = runs_folder(str(folder))
    rows = sorted((_result_row(run, *found) for run, found in _runs(place)), key=_begun)
    rows += [row for file in sorted(place.glob(f"*/{COMPARISON_FILE}")) for row in _cells(file)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _runs(folder: Path) -> Iterator[tuple[Path, tuple[dict[str, Any], dict[str, Any]]]]:
    """Yield every run folder with the content of run.json and of result.json, but for one that is being imported."""
    for path in folder.glob(f"*/{FACTS_FILE}"):
        if not path.parent.match(TEMPORARY_PATTERN) and (info := readable_json(path)) is not None:
            ended = {"status": "finished"} if (path.parent / SCORES_FILE).exists() else {}
            yield path.parent, (info, readable_json(path.parent / RESULT_FILE) or ended)


def _begun(row: dict[str, Any]) -> tuple[float, str]:
    """Return what sorts rows by the instant of their creation, whatever its time zone; unreadable ones come first."""
    try:
        return datetime.fromisoformat(row["created"]).timestamp(), row["run"]
    except (ValueError, OverflowError):
        return -math.inf, row["run"]


def _row(run: Path, info: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    settings = info.get("settings") or {}
    kind = "replay" if info.get("replay-of") else "import" if info.get("imported-from") else "run"
    return {
        "run": run.name,
        "created": str(info.get("created", "")),
        "kind": kind,
        "method": info.get("method", ""),
        "data": settings.get("data.name", ""),
        "clients": result.get("uploads") or info.get("num-supernodes"),  # clients of rounds upload nothing
        "seed": info.get("seed"),
        "status": result.get("status", "imported" if kind == "import" else "unfinished"),
        "accuracy": result.get("accuracy"),
    }


def _result_row(run: Path, info: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    settings, table = named_as_today(info.get("settings") or {}), result.get("table") or [{}]
    cost = result.get("communication", {}).get("total", {})
    return {
        **_row(run, info, result),
        "result": table[-1].get("name"),
        "partition": settings.get("data.partition"),
        "alpha": settings.get("data.alpha"),
        "best_accuracy": result.get("best_accuracy"),
        "server_s": result.get("seconds", {}).get("server"),
        "mib_per_client": sum(cost[key] for key in ("mib_up_per_client", "mib_down_per_client")) if cost else None,
        "weights_sha256": result.get("weights_sha256"),
    }


def _cells(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for every result of every cell of a comparison."""
    comparison = readable_json(file) or {}
    for cell in comparison.get("cells", []):
        stored = (readable_json(Path(cell["run"]) / FACTS_FILE) or {}).get("settings")
        settings = named_as_today(stored or {})
        for outcome in cell["outcomes"]:
            yield {
                "run": Path(cell["run"]).name,
                "kind": "comparison",
                "method": cell["method"],
                "result": outcome["name"],
                "data": comparison.get("data"),
                "partition": settings.get("data.partition"),
                "alpha": settings.get("data.alpha"),
                "clients": cell["uploads"],
                "seed": cell["seed"],
                "status": "finished",
                "accuracy": outcome["accuracy"],
                "best_accuracy": cell["best_accuracy"] if outcome["kind"] == "student" else None,
                "server_s": cell["server_s"],
                "mib_per_client": cell.get("mib_per_client"),
                "weights_sha256": cell["weights_sha256"],
                "comparison": file.parent.name,
            }


def readable_json(file: Path) -> dict[str, Any] | None:
    """Return the content of a file that holds a JSON object; None if it is missing, damaged or something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that is being written or is damaged; the command that opens it says so
        return None
    return found if isinstance(found, dict) else None
