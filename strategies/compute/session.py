"""Ray while it is in use, as a driver sees it; Ray itself is handed in."""

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
    """Ray while it is in use.

    Attributes:
        ray: The module.
        code: (digest, folder) of this library when this Ray came into use.
        paths: Where actors find this library, in front of their own ``sys.path``.
        actor: The actor's class, for ``ray.remote``.
        shard: That of a shard's actor.
        name: Tells this Ray from those before and after it.
    """

    ray: Any
    code: tuple[str, str]
    paths: tuple[str, ...]
    actor: type
    shard: type
    name: tuple[str, str]

    @classmethod
    def of(cls, ray: Any, paths: tuple[str, ...], actor: type, shard: type) -> Session:
        """Describe the Ray that runs now."""
        return cls(ray, code_digest(), paths, actor, shard, _name_of(ray))

    def check_code(self, code: tuple[str, str]) -> None:
        """Refuse an actor that runs other code than this process.

        Args:
            code: (digest, folder) of its library.

        Raises:
            ComputeError: Names both folders.
        """
        (digest, folder), (own_digest, own_folder) = code, self.code
        if digest != own_digest:
            meanwhile = "; it was edited meanwhile" if folder == own_folder else ""
            raise ComputeError(f"the Ray actor runs other code, {folder}, than the driver, {own_folder}{meanwhile}")

    def lasts(self) -> bool:
        """Say whether it is this Ray still that this process uses."""
        return bool(self.ray.is_initialized()) and _name_of(self.ray) == self.name

    def answer(self, reference: Any, tick: Callable[[], None], wait_s: float = math.inf) -> Any:
        """Return what an actor answers.

        Args:
            reference: The answer to come.
            tick: Called while waiting, and once after.
            wait_s: How long it may take.

        Raises:
            TimeoutError: It did not within ``wait_s`` seconds.
            ComputeError: Ray ended meanwhile.
        """
        deadline = time.monotonic() + wait_s
        while True:
            # Asked for a reference of a Ray that has ended, Ray would start another one.
            if not self.ray.is_initialized():
                raise ComputeError("Ray ended while the server stage was at work in it")
            if self.ray.wait([reference], timeout=_TICK_S)[0]:
                break
            if time.monotonic() > deadline:
                raise TimeoutError
            tick()
        tick()
        return self.ray.get(reference)


@dataclass(frozen=True)
class Terms:
    """What an actor is granted; see :class:`.ray_actors.RayActors`."""

    num_gpus: float | None
    max_restarts: int
    wait_s: float
    shards: int = 0


def _name_of(ray: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()
