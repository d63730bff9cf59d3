"""How the benchmark measures, speaks and keeps its figures.

One thread, CPU time of the process, medians of interleaved repetitions.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies.core.durable import read_json
from strategies.core.options import PRESET_NAMES
from strategies.core.processor import keep_freed_memory
from strategies.run.files import write_json

Row = Mapping[str, Any]


def say(line: str = "") -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def without_preset(name: str) -> str:
    """Return the name of a result without the preset and the shorter lengths that its row names."""
    return re.sub(rf" \((?:(?:{'|'.join(PRESET_NAMES)})(?:: )?)?(?:\d+ \w+ of \d+(?:, )?)*\)$", "", name)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that this process spends on some work."""
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cpu_seconds_in_a_stage(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work in the midst of a server stage, which keeps its memory from step to step."""
    with keep_freed_memory():
        work()
        return cpu_seconds(work)


def interleaved(
    works: Mapping[str, Callable[[], object]], repetitions: int, *, in_a_stage: Collection[str] = ()
) -> dict[str, float]:
    """Return the median CPU seconds of each piece of work; they take turns, so that a slow minute hits all of them.

    Args:
        works: Name -> work; each is done once more before, unmeasured, in which memory is laid out.
        repetitions: At least 1.
        in_a_stage: Names of the shipped pieces, which run as they do in a server stage.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repetitions):
        for name, work in works.items():
            measure = cpu_seconds_in_a_stage if name in in_a_stage else cpu_seconds
            taken[name].append(measure(work))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def row(cells: Sequence[object], widths: Sequence[int]) -> None:
    """Print a row of a table at once: the rows before the next one may take minutes."""
    say("".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def stored(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none if there is no file yet."""
    rows: list[dict[str, Any]] = read_json(out)["rows"] if out.exists() else []
    return rows


def place_of(row: Row, key: Sequence[str]) -> tuple[Any, ...]:
    """Return what a row has in the columns of a key."""
    return tuple(row[column] for column in key)


def keep(out: Path, rows: Sequence[Row], key: Sequence[str], **facts: Any) -> None:
    """Put rows into a file of results, in place of those that agree with them in the columns of the key.

    Several processes may do so at once.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        by_key = {place_of(row, key): row for row in [*stored(out), *rows]}
        write_json(out, {"rows": [by_key[place] for place in sorted(by_key)], **facts})
    finally:
        os.close(folder)
