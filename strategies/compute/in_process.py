"""Runs a job in this process; a Ray actor calls the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core.clients import Answer, Clients
from ..core.gpu import resolve_device
from ..core.processor import flush_subnormals, keep_freed_memory
from ..core.work import Counting, Work, count_work, work
from ..method import Job, Method, Outcome, Progress
from ..uploads.needs import check_needs
from .threads import Sharing, choose_threads, steady_threads


class InProcess:
    """Runs a job in the calling thread.

    Args:
        clients: Those that a method may ask further questions after their upload; None for a method that asks none.
    """

    def __init__(self, clients: Clients | None = None) -> None:
        self._clients = clients

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job`` with ``job.threads`` torch threads, see :mod:`.threads`.

        Raises:
            OptionError: The job lacks an input of the method, or names no torch device.
            ComputeError: This process does not see the job's device.
            QuorumError: Too few clients answer.
        """
        check_needs(method, job)
        job = replace(job, device=resolve_device(job.device))
        if self._clients is None or method.client_phase is None:
            threads = choose_threads(job)
            with torch_as_usual(threads), keep_freed_memory(), count_work(Work()) as counts:
                sharing = Sharing(job, threads, Counting(progress, counts))
                outcome = method.fit(job, sharing)
            return replace(outcome, work=counts.as_dict(), threads=sharing.counts)
        threads = steady_threads(job)
        with torch_as_usual(threads), keep_freed_memory(), count_work(Work()) as counts:
            outcome = method.client_phase.fit(job, Counting(progress, counts), _Counted(self._clients))
        return replace(outcome, work=counts.as_dict(), threads={0: threads})

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
        with torch.inference_mode(False), torch.enable_grad(), flush_subnormals():
            yield
    finally:
        torch.set_num_threads(before)


class _Counted:
    """Counts the questions to the clients as work of the server stage."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    @property
    def mib_per_client(self) -> float:
        return self._clients.mib_per_client

    def ask(self, *args: Any, **kwargs: Any) -> dict[str, Answer]:
        work().exchanges += 1
        return self._clients.ask(*args, **kwargs)
