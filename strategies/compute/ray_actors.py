"""Runs a job in a Ray actor, so that it takes a GPU of a simulation, of one server, or of a cluster.

Only the driver touches files. Uploads go to the actor through the object store, one at a time. The method's calls of
its Progress come back as events, which the driver replays on its own Progress. No other module imports Ray.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.offline import ray_token
from ..uploads.needs import check_needs
from .in_process import InProcess
from .kept_actor import KeptActor
from .ray_start import ActorTerms, NoRoomError, Session, start_ray
from .worker import Relay

if TYPE_CHECKING:
    from ..method import Job, Method, Outcome, Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RayActors:
    """Runs a job in a Ray actor.

    Attributes:
        num_gpus: The actor's share of a GPU; None for the free share at its start, at most 1. With a share of 0 it
            sees no GPU at all.
        address: A running Ray cluster; empty for ``$RAY_ADDRESS``, and without that for a Ray of this process's own.
        max_restarts: How often a dead actor is replaced; its successor resumes from the last checkpoint.
        wait_s: Seconds that the actor may take to start, and with ``owns_ray=False`` Ray before it.
        owns_ray: False if another thread of this process starts and ends Ray, as Flower's simulation does: this class
            then waits for it. Otherwise it uses a running Ray, or starts one and ends it afterwards.
        fallback: Run in this process if Ray is missing or has no room.
        shards: The number of actors that hold the clients' models. 1 holds them in the method's own actor. 0 takes one
            actor per GPU of several, else as many as their memory needs. A sum over shards rounds differently: results
            equal those of one actor in the first five digits of a step, not in every bit.
    """

    num_gpus: float | None = None
    address: str = ""
    max_restarts: int = 2
    wait_s: float = 120.0
    owns_ray: bool | None = None
    fallback: bool = True
    shards: int = 0

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``; the result equals that of :class:`InProcess` to the bit at equal threads.

        Args:
            method: Travels by name if it is in METHODS, else pickled by value.
            job: Its builders, config and observer are pickled by value.
            progress: ``resume`` is called before an actor begins. An optional ``save(snapshot)`` gets each checkpoint.
                An optional ``tick()`` is called at least twice a second once Ray runs. An optional ``interval_s`` is
                the least number of seconds between two checkpoints (else 20). Of consecutive reports only the last may
                arrive.

        Raises:
            OneShotError: The method raised it in the actor.
            ComputeError: The method failed otherwise, a value cannot be pickled, the actor runs other code or died too
                often. Without ``fallback`` also: Ray is missing or has no room.
        """
        # A merge of weights reads one tensor of every file at a time, and the files are here.
        with InProcess().kept() if method.any_model else self.kept() as kept:
            return kept.run(method, job, progress)

    @contextmanager
    def kept(self) -> Iterator[_KeptRay]:
        """Yield a place whose runs share one actor, and a Ray of this process's own if it has to start one.

        The first run makes both, and the block ends both. A run that finds no room logs it once; that run and all later
        ones of the block run in this process. The actor keeps the parts of a job, and changed parts are sent again. The
        method, builders, config and observer change with their pickles. Images on the server change if they are other
        tensors, or if torch has written into them. With a GPU, the actor holds its share from run to run, but no
        memory.
        """
        kept = _KeptRay(self)
        try:
            yield kept
        finally:
            kept.end()

    @contextmanager
    def session(self, tick: Callable[[], None]) -> Iterator[Session]:
        """Use the running Ray, or start one for the block.

        Args:
            tick: Called during the wait.

        Raises:
            NoRoomError: Ray is missing or does not start.
        """
        if not self.address and "ray" not in sys.modules:
            os.environ.update(ray_token(os.environ))
        try:
            import ray
        except ImportError as error:
            raise NoRoomError("Ray is not installed") from error
        if self.owns_ray is False:
            self._await_ray(ray, tick)
        paths = tuple(str(Path(path).absolute()) for path in sys.path)
        if ray.is_initialized():
            yield Session.of(ray, paths, _actor_class(), _shard_class())
            return
        cluster = self.address or os.environ.get("RAY_ADDRESS", "")
        session = None
        try:
            start_ray(ray, cluster)
            # A cluster receives the code itself; other code may lie at the same paths there.
            session = Session.of(ray, () if cluster else paths, _actor_class(), _shard_class())
            yield session
        finally:
            # Ray may have ended meanwhile, and another Ray, which belongs to someone else, may have replaced it.
            if session is None or session.lasts():
                ray.shutdown()

    def _await_ray(self, ray: Any, tick: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.wait_s
        while not ray.is_initialized():
            if time.monotonic() > deadline:
                raise NoRoomError(f"Ray was not started within {self.wait_s:g} s")
            tick()
            time.sleep(0.05)


class _KeptRay:
    """The place that the runs of one block use."""

    def __init__(self, place: RayActors) -> None:
        self._place = place
        self._actor: KeptActor | None = None
        self._open = ExitStack()
        self._here = False

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``; see :meth:`RayActors.run`."""
        check_needs(method, job)
        relay = Relay(progress)
        if not self._here:
            try:
                return self._found(relay.tick).run(method, job, relay)
            except NoRoomError as reason:
                if not self._place.fallback:
                    raise
                self._here = True
                self.end()
                _log.warning("%s: the server stage runs in this process", reason)
        return InProcess().run(method, job, progress)

    @contextmanager
    def kept(self) -> Iterator[_KeptRay]:
        """Yield this place, which is already kept."""
        yield self

    def end(self) -> None:
        """Kill the actor, and end Ray if it was started here."""
        self._actor = None
        self._open.close()

    def _found(self, tick: Callable[[], None]) -> KeptActor:
        """Return the actor of the earlier runs, or a new one if it or its Ray has ended."""
        place = self._place
        if self._actor is not None and not self._actor.reachable():
            self.end()
            if place.owns_ray is False:
                raise NoRoomError("the simulation's Ray has ended")
            _log.warning("Ray has ended since the last run: a new one replaces it")
        if self._actor is None:
            session = self._open.enter_context(place.session(tick))
            self._actor = KeptActor(session, ActorTerms(place.num_gpus, place.max_restarts, place.wait_s, place.shards))
            self._open.callback(self._actor.end)
        return self._actor


def _opener() -> Callable[[str, tuple[str, ...]], Callable[[str], Any]]:
    """Return a function that makes this library importable in an actor; local for the same reason as the classes."""

    def opened(library: str, paths: tuple[str, ...]) -> Callable[[str], Any]:
        import importlib
        import os
        import sys

        # The driver's order: Ray puts the working directory first, which may hold another copy of this library.
        found = [path for path in paths if os.path.exists(path)]  # noqa: PTH110
        sys.path[:] = found + [path for path in sys.path if path not in found]
        return lambda module: importlib.import_module(f"{library}.compute.{module}")

    return opened


def _actor_class() -> type:
    """Return the actor's class; local, so that Ray pickles it by value: the actor cannot import this library yet."""
    opened = _opener()

    class Actor:
        def __init__(self, library: str, paths: tuple[str, ...]) -> None:
            self.library = opened(library, paths)

        def open(self) -> tuple[str, str]:
            import ray

            shard = self.library("ray_shards").RayShard
            worker = self.library("worker")
            self.worker = worker.Worker(lambda actor: shard(ray, actor), ray.put)
            code: tuple[str, str] = worker.code_digest()
            return code

        def add_upload(self, facts: Any, references: list[Any]) -> None:
            import ray

            self.worker.add_upload(facts, (lambda: ray.get(references[0])) if references else None)

        def start(self, task: Any, snapshot: Any, interval_s: float, sharded: bool) -> None:
            self.worker.start(task, snapshot, interval_s, sharded=sharded)

        def poll(self, wait_s: float) -> Any:
            return self.worker.poll(wait_s)

        def reply(self, answer: Any) -> None:
            self.worker.reply(answer)

    return Actor


def _shard_class() -> type:
    """Return the class of a shard's actor, local for the same reason."""
    opened = _opener()

    class ShardActor:
        def __init__(self, library: str, paths: tuple[str, ...]) -> None:
            self.library = opened(library, paths)

        def open(self) -> tuple[str, str]:
            worker = self.library("worker")
            self.worker = worker.ShardWorker()
            code: tuple[str, str] = worker.code_digest()
            return code

        def ping(self) -> None:
            pass

        def begin(self, builders: Any, **how: Any) -> Any:
            return self.worker.begin(builders, **how)

        def add(self, facts: Any, references: list[Any]) -> Any:
            import ray

            return self.worker.add(facts, lambda: ray.get(references[0]))

        def close(self) -> Any:
            return self.worker.close()

        def forward(self, images: Any, request: Any) -> Any:
            return self.worker.forward(images, request)

        def backward(self, ticket: int, logits: Any, watched: Any) -> Any:
            return self.worker.backward(ticket, logits, watched)

    return ShardActor
