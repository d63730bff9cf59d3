"""How true the time left is: replays a run's uploads, and compares each estimate with what the rest took.

    oneshot run --set client.epochs=8
    python tests/bench/time_left.py latest

The clock is the process's CPU time, so that other work on the machine changes nothing; one thread.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from measure import say

from server_app.launch.runs import run_named
from server_app.replay.request import Request
from server_app.replay.stored import replay_run
from strategies.core.options import Scalar
from strategies.run import journal, pace

SETTINGS: Mapping[str, Mapping[str, Scalar]] = {
    "tally": {"tally.epochs": 12, "tally.images": 4096},
    "dense": {"dense.epochs": 12, "dense.pool-cap": 64},  # a pool of one epoch: all epochs cost the same
    "fedhydra": {"fedhydra.epochs": 12, "fedhydra.generator-steps": 10, "fedhydra.pool-cap": 128,
                 "fedhydra.stratification-steps": 10, "fedhydra.batch-size": 32},
    "dense, growing": {"dense.epochs": 12},
}  # fmt: skip
EPOCHS = 12  # of every method here; other stages have other totals
FROM = 0.1  # share of the epochs


class Watched(pace.Pace):
    """A pace whose reports are noted: CPU seconds, share of the epochs done, seconds left."""

    noted: list[tuple[float, float, float | None]]

    def note(self, now: float, step: int, total: int, part: tuple[int, int] = (0, 0)) -> None:
        """Take a report, and note what it tells."""
        super().note(now, step, total, part)
        if total != EPOCHS:
            return
        share = min((step + (part[0] / part[1] if part[1] else 0.0)) / total, 1.0 if step == total else 0.999)
        Watched.noted.append((now, share, self.left(now) if step < total else None))


def errors(run: Path, method: str, settings: Mapping[str, Scalar], place: Path) -> tuple[list[float], float, float]:
    """Return estimate / truth of every report from a tenth on, the seconds of the stage, and of its start."""
    Watched.noted = []
    began = time.process_time()
    replay_run(
        Request(run, method, {**settings, "threads": 1, "gatekeeper.policy": "off"}, folder=place), log=lambda _: None
    )
    end = min(now for now, share, _ in Watched.noted if share == 1.0 and now > began)  # the evaluation has 12 too
    late = [(now, left) for now, share, left in Watched.noted if left is not None and share >= FROM]
    ratios = [left / (end - now) for now, left in late if now < end - 0.5]
    first = next(now for now, share, _ in Watched.noted if share > 0.0)
    return ratios, end - began, first - began


def main() -> None:
    """Print a row per method."""
    journal.monotonic, journal.Pace = time.process_time, Watched  # type: ignore[misc, assignment]
    run = run_named(sys.argv[1])
    say("| method | reports | within 30 % | least | most | start, s | stage, s |\n|---|---|---|---|---|---|---|")
    for name, settings in SETTINGS.items():
        with tempfile.TemporaryDirectory() as place:
            ratios, whole, start = errors(run, name.partition(",")[0], settings, Path(place) / "run")
        near = sum(0.7 <= ratio <= 1.3 for ratio in ratios) / len(ratios)
        row = (
            name,
            len(ratios),
            f"{near:.0%}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            f"{start:.1f}",
            f"{whole:.1f}",
        )
        say("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
