"""How many threads a server stage has.

The second thread of a small net's step saves a tenth of its time on idle cores, and beside other work it multiplies it:
each operation waits for the thread that has no core. So a small net has one thread. Larger work has the cores that are
idle when the run begins, and at an epoch border no more than it got since the last one.

Parallel sums depend on the number of threads in their last bits. Therefore every number is recorded with the epoch that
it holds from, and a resumed or replayed stage follows the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.processor import all_cores, free_cores
from ..core.seeds import seeded_torch
from ..core.work import SMALL, count_multiplications

if TYPE_CHECKING:
    from ..method import Job, Snapshot

SHARED = 0.6  # of the threads' time: with less the cores are shared
SPAN_S = 1.0  # wall time, below which a share is chance
KEY = "threads"  # of a snapshot's state


def choose_threads(job: Job) -> int:
    """Return the number of threads that a stage begins with: the caller's, else what suits the student and the load."""
    if job.threads:
        return job.threads
    return 1 if multiplications(job) < SMALL else free_cores()


def steady_threads(job: Job) -> int:
    """Return the number for work without a record of it, whatever the load: the caller's, else one or all cores."""
    if job.threads:
        return job.threads
    return 1 if multiplications(job) < SMALL else all_cores()


def follow_threads(job: Job, outcome: Mapping[str, Any]) -> Job:
    """Return a job with the numbers that a run recorded, unless it has the caller's."""
    recorded = {int(epoch): int(count) for epoch, count in outcome.get("threads", {}).items()}
    return replace(job, threads=recorded.pop(0), later_threads=recorded) if recorded and not job.threads else job


def multiplications(job: Job) -> int:
    """Count the multiplications of the student's forward pass for one example, of its layers with a weight alone.

    Returns:
        The count; 0 for sums of features, which have no model, and for models whose examples are not known.
    """
    if job.student not in job.builders or not job.num_classes:
        return 0
    with seeded_torch(0, "threads"):
        return count_multiplications(job.builders[job.student]().eval(), job.input_shape)


class Sharing:
    """A Progress that adapts torch's threads at epoch borders to the cores that the stage gets.

    Attributes:
        counts: Epoch -> the number of threads from its end on; from 0 at the beginning.
    """

    def __init__(self, job: Job, count: int, progress: Any) -> None:
        self._job, self._progress, self._epoch = job, progress, 0
        self.counts = {0: count}
        self.report, self.record = progress.report, progress.record
        self._border = time.monotonic(), time.process_time()

    def resume(self) -> Snapshot | None:
        """Return the method's snapshot, and go on with the number that held then."""
        import torch

        snapshot: Snapshot | None = self._progress.resume()
        if snapshot is not None:
            self._epoch = snapshot.step
            self.counts |= {epoch: n for epoch, n in self._job.later_threads.items() if epoch <= self._epoch}
            if not self._job.threads and KEY in snapshot.state:
                self.counts = {int(epoch): count for epoch, count in snapshot.state[KEY].items()}
                snapshot = replace(snapshot, state=snapshot.state["state"])
            torch.set_num_threads(list(self.counts.values())[-1])
        elif not self._job.threads:
            self.record({"threads": self.counts[0], "after_epoch": 0})
        self._border = time.monotonic(), time.process_time()
        return snapshot

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Adapt the number, and offer a checkpoint, with the numbers so far where they are chosen here."""
        self._epoch += 1
        self._adapt()

        def with_counts() -> Snapshot:
            snapshot = take()
            counts = {str(epoch): count for epoch, count in self.counts.items()}
            return replace(snapshot, state={KEY: counts, "state": snapshot.state})

        self._progress.checkpoint(take if self._job.threads else with_counts)

    def _adapt(self) -> None:
        import torch

        now = torch.get_num_threads()
        wanted = self._job.later_threads.get(self._epoch, now) if self._job.threads else self._got(now)
        if wanted != now:
            torch.set_num_threads(wanted)
            self.counts[self._epoch] = wanted
            self.record({"threads": wanted, "after_epoch": self._epoch})

    def _got(self, count: int) -> int:
        """Return how many cores the stage had since the last border, if they were too few for its threads."""
        wall, cpu = (
            now - then for now, then in zip((time.monotonic(), time.process_time()), self._border, strict=True)
        )
        # Elsewhere the stage waits for a GPU or for other processes, and its own threads show nothing.
        if count == 1 or self._job.device != "cpu" or self._job.shards is not None or wall < SPAN_S:
            return count
        self._border = time.monotonic(), time.process_time()
        return count if cpu / wall >= SHARED * count else max(1, round(cpu / wall))
