"""Where a job runs: in this process, or in a Ray actor."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import OptionError

if TYPE_CHECKING:
    from ..method import Job, Method, Outcome, Progress
    from .in_process import InProcess
    from .ray_actors import RayActors

__all__ = ["InProcess", "RayActors", "ServerCompute", "choose", "named"]

_HOMES = {"InProcess": "in_process", "RayActors": "ray_actors"}


class ServerCompute(Protocol):
    """A place to run a job. All places end with the same bits at equal threads, on equal hardware."""

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``.

        Args:
            job: Its job; ``device="auto"`` means a GPU where one is visible, else the CPU.
            progress: Called in this process, from the calling thread.

        Raises:
            OneShotError: The method refused the job, or the place cannot run it.
        """

    def kept(self) -> AbstractContextManager[ServerCompute]:
        """Return a block for many runs in turn, whose later runs reuse the processes of the first.

        The block yields the place to run them at, for one thread. Results equal those of as many single runs.
        """


def choose(compute: str | ServerCompute | None, *, owns_ray: bool | None = None) -> ServerCompute:
    """Return the place of the setting ``compute``, or of a strategy's argument of that name.

    Args:
        compute: A place, which is returned; ``"ray"``, ``"ray:4"`` for Ray with the clients' models in 4 shards,
            ``"in-process"``, or ``"auto"``, as None: Ray for shards, and where there is a GPU or a Ray cluster
            (``RAY_ADDRESS``), else this process.

    Raises:
        OptionError: The name is unknown.
    """
    if not isinstance(compute, str | None):
        return compute
    name = "auto" if compute is None else compute
    place, _, shards = name.partition(":")
    if place == "auto" and (shards.isdecimal() or name == place):
        place = "ray" if int(shards or 0) > 1 or _gains_from_ray() else "in-process"
        name = f"{place}:{shards}" if shards and place == "ray" else place
    if place == "ray" and (shards.isdecimal() or name == place):
        from .ray_actors import RayActors

        return RayActors(owns_ray=owns_ray, shards=int(shards or 0))
    if name == "in-process":
        from .in_process import InProcess

        return InProcess()
    raise OptionError(f"setting 'compute' is {name!r}: must be one of 'auto', 'ray', 'in-process'")


def _gains_from_ray() -> bool:
    import torch

    return bool(os.environ.get("RAY_ADDRESS")) or torch.cuda.is_available()


def place_name(compute: str, shards: int) -> str:
    """Return the name of a place for :func:`choose`, from two settings.

    Args:
        compute: ``"auto"``, ``"ray"`` or ``"in-process"``.

    Raises:
        OptionError: The shards need Ray.
    """
    if compute != "in-process":
        return f"{compute}:{shards}" if shards else compute
    if shards > 1:
        raise OptionError(f"setting 'shards' is {shards}: needs compute='ray', but setting 'compute' is {compute!r}")
    return compute


def __getattr__(name: str) -> Any:
    # PEP 562: the import of one place must not import the other.
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
