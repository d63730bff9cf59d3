"""How the benchmark measures and speaks: one thread, CPU time of the process, medians of interleaved repetitions."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from strategies.core.memory import kept_memory


def say(line: str = "") -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that this process spends on some work."""
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cpu_seconds_in_a_stage(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work in the midst of a server stage, which keeps its memory from step to step."""
    with kept_memory():
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
