"""A running Ray from the driver's side; the caller passes Ray in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import ComputeError
from .worker import code_digest

# The most seconds between two calls of Progress.tick.
_TICK_S = 0.4


@dataclass(frozen=True)
class Session:
    """A running Ray.

    Attributes:
        ray: The module.
        code: (digest, folder) of this library when this Ray was first used.
        paths: The folders of this library for actors, in front of their own ``sys.path``.
        actor: The actor's class, for ``ray.remote``.
        shard: The class of a shard's actor.
        name: The name of this Ray, unlike those of earlier and later ones.
    """

    ray: Any
    code: tuple[str, str]
    paths: tuple[str, ...]
    actor: type
    shard: type
    name: tuple[str, str]

    @classmethod
    def of(cls, ray: Any, paths: tuple[str, ...], actor: type, shard: type) -> Session:
        """Describe the running Ray."""
        return cls(ray, code_digest(), paths, actor, shard, _name_of(ray))

    def check_code(self, code: tuple[str, str]) -> None:
        """Refuse an actor that runs other code than this process.

        Args:
            code: (digest, folder) of its library.

        Raises:
            ComputeError: The code differs; the error names both folders.
        """
        (digest, folder), (own_digest, own_folder) = code, self.code
        if digest != own_digest:
            meanwhile = "; it was edited meanwhile" if folder == own_folder else ""
            raise ComputeError(f"the Ray actor runs other code, {folder}, than the driver, {own_folder}{meanwhile}")

    def lasts(self) -> bool:
        """Return whether this process still uses this Ray."""
        return bool(self.ray.is_initialized()) and _name_of(self.ray) == self.name

    def answer(self, reference: Any, tick: Callable[[], None], wait_s: float = math.inf) -> Any:
        """Return an actor's answer.

        Args:
            reference: The reference of the answer.
            tick: Called during the wait, and once after it.
            wait_s: The longest wait in seconds.

        Raises:
            TimeoutError: No answer came within ``wait_s`` seconds.
            ComputeError: Ray ended meanwhile.
        """
        deadline = time.monotonic() + wait_s
        while True:
            # Given a reference of a Ray that has ended, Ray would start another one.
            if not self.ray.is_initialized():
                raise ComputeError("Ray ended during the server stage")
            if self.ray.wait([reference], timeout=_TICK_S)[0]:
                break
            if time.monotonic() > deadline:
                raise TimeoutError
            tick()
        tick()
        return self.ray.get(reference)


@dataclass(frozen=True)
class Terms:
    """An actor's resources and limits; see :class:`.ray_actors.RayActors`."""

    num_gpus: float | None
    max_restarts: int
    wait_s: float
    shards: int = 0


def _name_of(ray: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()
