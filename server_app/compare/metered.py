"""The cost of a server stage: wall time, CPU time and memory, over all processes that worked on it."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strategies.compute import ServerCompute
from strategies.core.durable import store_errors
from strategies.core.errors import StoreError
from strategies.method import Job, Method, Outcome, Part, Progress, Snapshot
from strategies.run.lines import JsonLines

USAGE_FILE = "usage.jsonl"
_END = "end"  # the step of the last row, after the stage


@dataclass(frozen=True)
class Usage:
    """The cost of a stage so far.

    Attributes:
        wall_s: Wall time in seconds.
        cpu_s: CPU time, user and system, of all threads, in seconds.
        peak_mib: Peak memory of its process since its start, in MiB; Python, torch and the held-out images included.
        gpu_mib: Peak memory of torch on the GPU, in MiB; 0 without a GPU.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    gpu_mib: float = 0.0

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Usage:
        """Return the usage of a row that :func:`dataclasses.asdict` made."""
        return cls(row["wall_s"], row["cpu_s"], row["peak_mib"], row["gpu_mib"])


class Metered:
    """A ServerCompute in this process that writes the cost of a job to the run folder.

    Times count from checkpoint to checkpoint. The next process repeats the work that a killed one did after its last
    checkpoint, and this work counts once.

    Args:
        compute: Runs the job; it must work in this process, whose CPU time and memory are measured.
        folder: The run folder.
    """

    def __init__(self, compute: ServerCompute, folder: Path) -> None:
        self._compute = compute
        self._folder = folder

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``; see :class:`strategies.compute.ServerCompute`."""
        meter = _Meter(progress, self._folder)
        outcome = self._compute.run(method, job, meter)
        meter.note(_END)
        return outcome

    @contextmanager
    def kept(self) -> Iterator[Metered]:
        """Yield a metered compute for many runs."""
        with self._compute.kept() as compute:
            yield Metered(compute, self._folder)


class _Meter:
    """A Progress that records the usage at every checkpoint, and forwards everything else."""

    def __init__(self, progress: Progress, folder: Path) -> None:
        self._progress = progress
        self._lines = JsonLines(folder / USAGE_FILE)
        self._before = Usage()
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def resume(self) -> Snapshot | None:
        snapshot = self._progress.resume()
        if snapshot is not None:
            then = [row for row in self._lines.rows() if row["step"] == snapshot.step]
            self._before = Usage.of_row(then[-1]) if then else Usage()
        return snapshot

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, part: Part = (0, 0)) -> None:
        self._progress.report(step, total, values, part)

    def record(self, row: Mapping[str, Any]) -> None:
        self._progress.record(row)

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        def noted() -> Snapshot:
            snapshot = take()
            # Written before the checkpoint, so every checkpoint has its row; a row without a checkpoint is harmless.
            self.note(snapshot.step)
            return snapshot

        self._progress.checkpoint(noted)

    def note(self, step: int | str) -> None:
        now = Usage(
            self._before.wall_s + time.monotonic() - self._wall,
            self._before.cpu_s + time.process_time() - self._cpu,
            max(self._before.peak_mib, peak_mib()),
            max(self._before.gpu_mib, _gpu_mib()),
        )
        with store_errors(self._lines.path):
            self._lines.append({"step": step, **asdict(now)})


def usage_of(folder: Path) -> Usage:
    """Return the cost of the finished server stage of a run folder.

    Raises:
        StoreError: The stage was not metered, or has not finished.
    """
    lines = JsonLines(folder / USAGE_FILE)
    with store_errors(lines.path):
        ends = [row for row in lines.rows() if row["step"] == _END]
    if not ends:
        raise StoreError(f"{lines.path}: has no row of a finished server stage; remove {folder} to run it again")
    return Usage.of_row(ends[-1])


def peak_mib() -> float:
    """Return the peak memory of this process so far, in MiB."""
    if sys.platform == "linux":
        # Not getrusage, whose peak a new program inherits from the process that started it.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def _gpu_mib() -> float:
    import torch

    # 0 without a GPU, or before its first use.
    return torch.cuda.max_memory_allocated() / 2**20
