"""Runs the cells of a comparison, as many at once as the cores hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from server_app.compare.cell import Cell, expected_seconds, facts_of, run_cell
from server_app.compare.sources import info_of
from server_app.launch.guard import guarded
from server_app.settings.read import default_settings
from strategies.core.gpu import resolve_device
from strategies.run.journal import duration
from strategies.run.stage import all_cores

Log = Callable[[str], None]


def jobs_for(cells: Sequence[Cell]) -> int:
    """Return how many cells can run at once: a cell per core, or per ``threads`` cores; one where a GPU works.

    Each cell keeps its own number of threads, so its figures are those that it has alone.

    Raises:
        ComputeError: A cell needs a GPU that this machine lacks.
    """
    cores, settings = all_cores(), [_settings_of(cell) for cell in cells]
    on_gpu = any(resolve_device(str(each["device"])).partition(":")[0] != "cpu" for each in settings)
    threads = (int(each["threads"]) or cores for each in settings)
    return 1 if on_gpu else max(1, min(len(cells), cores // max(threads, default=cores)))


def _settings_of(cell: Cell) -> Mapping[str, Any]:
    """Return a cell's settings; a run of another project works on the CPU, with all cores."""
    stored = info_of(cell.run).get("settings")
    begun = {**default_settings(), **stored} if isinstance(stored, dict) else {"device": "cpu", "threads": 0}
    return {**begun, **cell.overrides}


@dataclass
class _Work:
    """The cells that are to run, and how long the finished ones took."""

    cells: Sequence[Cell]
    jobs: int
    token: str
    log: Log
    total: int
    took: list[tuple[str, float]]
    begun: list[Cell] = field(default_factory=list)

    def run(self, cell: Cell) -> str:
        """Run one cell; return why it failed, empty for success."""
        self.begun.append(cell)
        rest = [other for other in self.cells if other not in self.begun[: -self.jobs]]
        seconds = expected_seconds(rest, self.took) / self.jobs if self.took else 0.0
        number = self.total - len(self.cells) + len(self.begun)
        left = f", about {duration(seconds)} left" if self.took else ""
        verb = "resumed: " if cell.begun else ""
        self.log(f"cell {number} of {self.total}: {verb}{cell.title}{left}")
        began = time.monotonic()
        reason = run_cell(cell, self.token, self._said_by(cell))
        if reason:
            self.log(f"{cell.title} failed: {reason}")
        else:
            self.took.append((cell.method, time.monotonic() - began))
        return reason

    def _said_by(self, cell: Cell) -> Log:
        return self.log if self.jobs == 1 else lambda line: self.log(f"{cell.method}, {cell.run_name}: {line}")


def run_cells(cells: Sequence[Cell], jobs: int, log: Log) -> list[tuple[str, str]]:
    """Run the unfinished cells.

    Args:
        cells: The cells of a comparison.
        jobs: How many run at once, at least 1.
        log: Takes a line for the user.

    Returns:
        Title and reason of every failed cell; two may have the same title.
    """
    known = [facts_of(cell) for cell in cells]
    took = [(cell.method, float(facts["total_s"])) for cell, facts in zip(cells, known, strict=True) if facts]
    todo = [cell for cell, facts in zip(cells, known, strict=True) if not facts]
    if done := len(cells) - len(todo):
        log(f"{done} cell{'s have' if done > 1 else ' has'} finished before")
    with ThreadPoolExecutor(jobs) as pool, guarded() as (_, token):
        work = _Work(todo, jobs, token, log, len(cells), took)
        futures = {pool.submit(work.run, cell): cell for cell in todo}
        try:
            reasons = [(futures[future].title, future.result()) for future in as_completed(futures)]
        except BaseException:
            # The guardian ends the cells' processes; those that wait must not start.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [(title, reason) for title, reason in reasons if reason]
