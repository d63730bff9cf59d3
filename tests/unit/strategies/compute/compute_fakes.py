"""What the tests of Ray share: their marks, clients' uploads, and a progress that keeps all it hears."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.facts import UploadFacts
from strategies.method import Silent, Snapshot, Upload

ON_RAY = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Ray's own: a tip on its next release, and log files and processes that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def uploads_of(build: Callable[[], nn.Module], count: int, seed: int = 0) -> tuple[Upload, ...]:
    """Return so many uploads of one architecture, whose weights are drawn."""

    def weights(number: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(seed + number)
        return {key: torch.randn(value.shape, generator=draws) for key, value in build().state_dict().items()}

    return tuple(Upload(UploadFacts(f"c{n}", "net", 10 + n, (5, 5 + n)), partial(weights, n)) for n in range(count))


class Heard(Silent):
    """Keeps all that a method says, and resumes from its last checkpoint."""

    interval_s = 0.0

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.snapshots: list[Snapshot] = []
        self.resumed: list[int] = []
        self.ticks: list[float] = []

    @property
    def pids(self) -> list[int]:
        return [row["pid"] for row in self.rows]

    def resume(self) -> Snapshot | None:
        if not self.snapshots:
            return None
        last = self.snapshots[-1]
        self.resumed.append(last.step)
        kept = {name: torch.cat([each.appended[name] for each in self.snapshots]) for name in last.appended}
        return replace(last, appended=kept)

    def record(self, row: Any) -> None:
        self.rows.append(dict(row))

    def checkpoint(self, take: Any) -> None:
        self.save(take())

    def save(self, snapshot: Snapshot) -> None:
        self.snapshots.append(copy.deepcopy(snapshot))

    def tick(self) -> None:
        self.ticks.append(time.monotonic())
