"""Cells of a comparison at once: as many as the cores hold, each with its own threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from server_app.compare import comparison
from server_app.compare.cell import Cell
from server_app.compare.comparison import jobs_for, run_cells
from strategies.run.files import write_json


def cells(folder: Path, *methods: str, settings: Mapping[str, Any] | None = None, **changes: Any) -> list[Cell]:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    # The number of threads that the run had on its own machine is not that of its replays.
    write_json(run / "run.json", {"id": "0" * 32, "threads": 1, "seed": 0, "settings": settings})
    return [Cell(run, method, 0, folder / method, changes) for method in methods]


@pytest.mark.parametrize(("cores", "threads", "wanted"), [(8, 1, 3), (8, 4, 2), (2, 2, 1), (2, 8, 1), (4, 0, 3)])
def test_a_cell_takes_a_core_for_each_of_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, wanted: int
) -> None:
    monkeypatch.setattr(comparison, "all_cores", lambda: cores)
    methods, cpu = ("fedens", "tally", "dense"), {"device": "cpu"}

    assert jobs_for(cells(tmp_path, *methods, settings={**cpu, "threads": threads})) == wanted
    assert jobs_for(cells(tmp_path, *methods, settings={**cpu, "threads": 1}, threads=threads)) == wanted
    assert jobs_for(cells(tmp_path, *methods)) == min(3, cores)  # of another project, whose cells adapt to the load


def test_cells_run_at_once_and_failures_have_their_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, lines = threading.Barrier(2, timeout=10), list[str]()

    def here(cell: Cell, token: str, log: Callable[[str], None]) -> str:
        both.wait()  # passes only while two cells run
        log("at work")
        return "no memory" if cell.method == "dense" else ""

    monkeypatch.setattr(comparison, "run_cell", here)
    monkeypatch.setattr(comparison, "guarded", lambda: nullcontext((Path(), "")))

    assert run_cells(cells(tmp_path, "fedens", "dense"), 2, lines.append) == [("dense, seed 0, run", "no memory")]
    assert {"fedens, run: at work", "dense, run: at work"} <= {*lines}


def test_an_interrupt_starts_no_further_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def stop(cell: Cell, token: str, log: Callable[[str], None]) -> str:
        begun.append(cell.method)
        if len(begun) > 1:  # it has begun before the pool was told to stop: those after it have not
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "run_cell", stop)
    monkeypatch.setattr(comparison, "guarded", lambda: nullcontext((Path(), "")))
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells(tmp_path, *(f"m{k}" for k in range(200))), 1, lambda _: None)

    assert len(begun) < 200
