"""Test accuracy against CPU seconds: Co-Boosting's pass over the whole pool, and a bounded one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from measure import row, say
from published_loops import Settings
from side_by_side import Case, shipped_job, shipped_method
from small_federation import accuracy, digits_clients
from torch import nn

from fl_app.models import build
from strategies.method import Silent

CLIENTS, BOUND = 5, 8
SHOWN = (0.25, 0.5, 0.75, 1.0)  # of the epochs


class Clock(Silent):
    """Keeps the CPU seconds at the end of each epoch with the student's accuracy."""

    def __init__(self) -> None:
        self.begin, self.points = time.process_time(), list[tuple[float, float]]()

    def record(self, row: Mapping[str, Any]) -> None:
        """Keep an epoch's row."""
        self.points.append((time.process_time() - self.begin, float(row["accuracy"])))


def schedules(epochs: int, seeds: int) -> None:
    """Print accuracy and CPU seconds of both schedules along the epochs, means over some seeds."""
    say(
        f"Co-Boosting on scikit-learn's digits, {CLIENTS} clients, LeNet-5, batch 32: mean over {seeds} seeds of the "
        f"student's test accuracy (%) against CPU seconds"
    )
    shipped = partial(build, "lenet5", num_classes=10, input_shape=(1, 8, 8))
    clients = digits_clients(shipped, clients=CLIENTS, alpha=0.5, seed=0, epochs=60)
    widths = (18, 7, 8, 9)
    row(["schedule", "epoch", "CPU s", "accuracy"], widths)
    for name, steps in [("whole pool", 0), (f"at most {BOUND} steps", BOUND)]:
        runs = [curve(shipped, clients, epochs, steps, seed) for seed in range(seeds)]
        for share in SHOWN:
            at = max(1, round(share * epochs)) - 1
            seconds, scores = zip(*(run[at] for run in runs), strict=True)
            row([name, at + 1, f"{statistics.fmean(seconds):.1f}", f"{statistics.fmean(scores):.1f}"], widths)


def curve(shipped: Any, clients: list[dict[str, Any]], epochs: int, steps: int, seed: int) -> list[tuple[float, float]]:
    """Run the shipped method; return CPU seconds and accuracy after each epoch."""
    settings = Settings(epochs=epochs, steps=10, batch=32, generator_lr=3e-3, student_lr=0.05)
    job = shipped_job(Case("co-boosting", (1, 8, 8), shipped, shipped, len(clients), settings, seed), clients)
    config = replace(job.config, steps_per_epoch=steps)
    clock = Clock()
    shipped_method("co-boosting").fit(replace(job, config=config, observer=observe), clock)
    return clock.points


def observe(epoch: int, module: nn.Module) -> dict[str, float]:
    """Score the student."""
    return {"accuracy": accuracy(module)}
