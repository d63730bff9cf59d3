"""Runs a method that needs its clients after their upload: in this process, which reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError
from ..core.gpu import resolve_device
from ..core.processor import kept_memory
from ..core.work import Counting, Work, counted, work
from ..uploads.needs import check_needs
from .in_process import torch_as_usual

if TYPE_CHECKING:
    from ..core.clients import Answer, Clients
    from ..method import Job, Method, Outcome, Progress


class WithClients:
    """A place whose method may send questions to the clients.

    Args:
        clients: The clients.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``, with the clients in reach.

        Raises:
            OptionError: The method sends its clients no questions, or the job lacks an input of the method.
            QuorumError: Too few clients answer.
        """
        if method.fit_with is None:
            raise OptionError(f"method {method.name!r} sends its clients no questions after their upload")
        check_needs(method, job)
        job = replace(job, device=resolve_device(job.device))
        with torch_as_usual(job.threads), kept_memory(), counted(Work()) as counts:
            outcome = method.fit_with(job, Counting(progress, counts), _Counted(self._clients))
        return replace(outcome, work=counts.as_dict())

    @contextmanager
    def kept(self) -> Iterator[WithClients]:
        """Yield this place, which has nothing to start."""
        yield self


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
