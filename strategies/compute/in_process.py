"""Runs a job in this process; a Ray actor calls the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..core.gpu import resolve_device
from ..core.processor import kept_memory, subnormals_as_zero
from ..core.work import Counting, Work, counted
from ..method import Job, Method, Outcome, Progress
from ..uploads.needs import check_needs


class InProcess:
    """Runs a job in the calling thread."""

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job`` with exactly ``job.threads`` torch threads.

        Args:
            method: The method.
            job: Its job; ``device="auto"`` means a GPU where one is visible, else the CPU.
            progress: The method calls it directly.

        Raises:
            OptionError: The job lacks an input of the method, or names no torch device.
            ComputeError: This process does not see the job's device.
        """
        check_needs(method, job)
        job = replace(job, device=resolve_device(job.device))
        with torch_as_usual(job.threads), kept_memory(), counted(Work()) as counts:
            outcome = method.fit(job, Counting(progress, counts))
        return replace(outcome, work=counts.as_dict())

    @contextmanager
    def kept(self) -> Iterator[InProcess]:
        """Yield this place, which has nothing to start."""
        yield self


@contextmanager
def torch_as_usual(count: int) -> Iterator[None]:
    """Set torch's thread count of the calling thread for a block, in which gradients flow though the caller has none.

    Args:
        count: At least 1. It decides the order of parallel sums, and so the last bits of a result.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.inference_mode(False), torch.enable_grad(), subnormals_as_zero():
            yield
    finally:
        torch.set_num_threads(before)
