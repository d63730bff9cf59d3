"""How soon runs in rounds reach an accuracy, as in Table 2 of FLBoost (Zhang et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server_app.report.drawing import save_all
from server_app.report.page import PAGE_FILE, write_page
from server_app.rounds.page import rounds_page, rounds_setting
from server_app.rounds.plot import plot_rounds
from server_app.rounds.runs import read_runs, settings_of
from server_app.rounds.table import RoundsLine, default_targets, line_of
from strategies.core.durable import make_folder, store_errors
from strategies.core.errors import OptionError, StoreError
from strategies.core.places import expanded
from strategies.run.files import write_json

FACTS_FILE = "rounds.json"
PLOT = "learning_curves"


def report_rounds(
    runs: Sequence[Path],
    targets: Sequence[float] = (),
    out: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], list[RoundsLine]]:
    """Compare runs in rounds; they may be unfinished.

    Args:
        runs: Their folders, of one data set.
        targets: Accuracies in %; empty: :func:`server_app.rounds.table.default_targets`.
        out: A folder for rounds.json, the plot of the learning curves and a page, new or of an earlier report; None
            to write nothing.
        log: Takes a line for the user.

    Returns:
        The content of rounds.json, and the lines of the table.

    Raises:
        OptionError: The runs cannot be compared.
        StoreError: A folder is no run folder, is damaged, or holds no report.
    """
    folder = _folder(out)
    data, found = read_runs(runs)
    settings = settings_of(found)
    wanted = tuple(sorted(set(targets))) or default_targets(settings)
    lines = [line_of(setting, wanted) for setting in settings]
    facts: dict[str, Any] = {
        "data": data,
        "targets": list(wanted),
        "table": [line.as_json() for line in lines],
        "runs": [_run_facts(line) for line in lines],
        "out": str(folder or ""),
        "plot": "",
        "results": FACTS_FILE if folder else "",
        "page": PAGE_FILE if folder else "",
    }
    if folder is not None:
        with store_errors(folder):
            make_folder(folder)
        drawn = save_all(folder, {PLOT: lambda: plot_rounds(lines, wanted)}, rounds_setting(lines), log)
        facts["plot"] = "".join(drawn)
        write_page(folder / PAGE_FILE, rounds_page(facts, lines))
        write_json(folder / FACTS_FILE, facts)
    return facts, lines


def _run_facts(line: RoundsLine) -> dict[str, Any]:
    """Return the runs of a line with their curves: rounds, accuracies in %, MiB per client so far."""
    return {
        "name": line.name,
        "seeds": {
            str(run.seed): {
                "run": str(run.path),
                "rounds": run.done,
                "curve": [[test.number, test.accuracy, test.mib] for test in run.tested],
            }
            for run in line.runs
        },
    }


def _folder(out: Path | None) -> Path | None:
    if out is None:
        return None
    folder = expanded(out).absolute()
    if folder.exists() and not (folder.is_dir() and ((folder / FACTS_FILE).exists() or not any(folder.iterdir()))):
        raise StoreError(f"{folder}: holds no such report; --out must be a new folder, or one with {FACTS_FILE}")
    return folder


def read_targets(text: str) -> tuple[float, ...]:
    """Read comma-separated accuracies in %; an empty text has none.

    Raises:
        OptionError: One is not a number above 0 and at most 100.
    """
    try:
        found = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        found = (0.0,)
    if not all(0.0 < target <= 100.0 for target in found):
        raise OptionError(
            f"--targets is {text!r}: must be comma-separated accuracies in %, above 0 and at most 100, such as 75,80"
        )
    return found
