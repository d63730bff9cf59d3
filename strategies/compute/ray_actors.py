"""Runs a job in a Ray actor, so that it takes a GPU of a simulation, of one server, or of a cluster.

The driver alone touches files. Uploads go to the actor through the object store, one at a time; what the method says
comes back as events, which are replayed on the driver's Progress. This is the only module that imports Ray.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ComputeError
from ..method import Job, Method, Outcome, Progress, Upload
from ..needs import check_needs
from .by_value import LIBRARY
from .in_process import InProcess
from .packing import pack, unpack
from .ray_start import NoRoomError, start_ray
from .relay import Relay
from .task import Task
from .worker import Failure, code_digest

_log = logging.getLogger(__name__)

# The most seconds between two calls of Progress.tick, and those that an actor waits for something to say.
_TICK_S = 0.4
_POLL_S = 10.0


@dataclass(frozen=True)
class _Session:
    """Ray while it is in use.

    Attributes:
        ray: The module.
        tick: Called while waiting.
        code: (digest, folder) of this library when the run began.
        paths: Where actors find this library, in front of their own ``sys.path``.
    """

    ray: Any
    tick: Callable[[], None]
    code: tuple[str, str]
    paths: tuple[str, ...]

    def answer(self, reference: Any, wait_s: float = math.inf) -> Any:
        """Return what an actor answers.

        Args:
            reference: The answer to come.
            wait_s: How long it may take.

        Raises:
            TimeoutError: It did not within ``wait_s`` seconds.
        """
        deadline = time.monotonic() + wait_s
        while not self.ray.wait([reference], timeout=_TICK_S)[0]:
            if time.monotonic() > deadline:
                raise TimeoutError
            self.tick()
        self.tick()
        return self.ray.get(reference)


@dataclass(frozen=True)
class _Parcel:
    """A task, and its uploads in Ray's object store: the facts of each, and the reference of its packed weights."""

    task: Task
    uploads: tuple[tuple[Mapping[str, Any], Any], ...]


@dataclass(frozen=True, kw_only=True)
class RayActors:
    """Runs a job in a Ray actor.

    Attributes:
        num_gpus: The actor's share of a GPU; None for what is free when it starts, at most 1. With a share of 0 it
            sees no GPU at all.
        address: A running Ray cluster; empty for ``$RAY_ADDRESS``, and without that for a Ray of this process's own.
        max_restarts: How often a dead actor is replaced, from the last checkpoint on.
        wait_s: Seconds that the actor may take to start, and with ``owns_ray=False`` Ray before it.
        owns_ray: False if another thread of this process starts and ends Ray, as Flower's simulation does: wait for
            it, never start one. Otherwise use Ray if it runs, else start it and end it after.
        fallback: Run in this process if Ray is missing or has no room.
    """

    num_gpus: float | None = None
    address: str = ""
    max_restarts: int = 2
    wait_s: float = 120.0
    owns_ray: bool | None = None
    fallback: bool = True

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``; ends with the bits of :class:`InProcess` at equal threads.

        Args:
            method: Travels by name if it is in METHODS, else pickled by value.
            job: Its builders, config and observer are pickled by value.
            progress: ``resume`` is called before an actor begins. If it has them: ``save(snapshot)`` gets each
                checkpoint, ``tick()`` is called at least twice a second once Ray runs, ``interval_s`` is the least
                time between two checkpoints in seconds (else 20). Of reports in a row only the last may arrive.

        Raises:
            OneShotError: As the method raised it in the actor.
            ComputeError: The method failed otherwise, something cannot be pickled, the actor runs other code or died
                too often; without ``fallback`` also: Ray is missing or has no room.
        """
        check_needs(method, job)
        relay = Relay(progress)
        try:
            with self._session(relay.tick) as session:
                return self._supervise(session, method, job, relay)
        except NoRoomError as reason:
            if not self.fallback:
                raise
            _log.warning("%s: the server stage runs in this process", reason)
        return InProcess().run(method, job, progress)

    @contextmanager
    def _session(self, tick: Callable[[], None]) -> Iterator[_Session]:
        try:
            import ray
        except ImportError as error:
            raise NoRoomError("Ray is not installed") from error
        if self.owns_ray is False:
            self._await_ray(ray, tick)
        code, paths = code_digest(), tuple(str(Path(path).absolute()) for path in sys.path)
        if ray.is_initialized():
            yield _Session(ray, tick, code, paths)
            return
        cluster = self.address or os.environ.get("RAY_ADDRESS", "")
        try:
            start_ray(ray, cluster)
            # A cluster gets the code itself; what lies at the same paths over there may be something else.
            yield _Session(ray, tick, code, () if cluster else paths)
        finally:
            ray.shutdown()

    def _await_ray(self, ray: Any, tick: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.wait_s
        while not ray.is_initialized():
            if time.monotonic() > deadline:
                raise NoRoomError(f"Ray was not started within {self.wait_s:g} s")
            tick()
            time.sleep(0.05)

    def _supervise(self, session: _Session, method: Method, job: Job, relay: Relay) -> Outcome:
        ray = session.ray
        task = Task.of(method, job, ray.cloudpickle)
        # One by one: a reference keeps nothing in this process.
        uploads = tuple((_facts(upload), ray.put(pack(upload.read()))) for upload in relay.ticking(job.uploads))
        deaths = 0
        while True:
            try:
                return self._attempt(session, _Parcel(task, uploads), relay)
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                deaths += 1
                if deaths > self.max_restarts:
                    raise ComputeError(
                        f"method {method.name!r}: {deaths} Ray actors died, the last: {error}"
                    ) from error
                _log.warning("the Ray actor died; restart %d of %d from the last checkpoint", deaths, self.max_restarts)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise ComputeError(f"method {method.name!r} in a Ray actor: {type(cause).__name__}: {cause}") from error

    def _attempt(self, session: _Session, parcel: _Parcel, relay: Relay) -> Outcome:
        ray = session.ray
        actor = self._new_actor(session, parcel.task.job.device)
        try:
            self._check_code(session, actor)
            for facts, reference in parcel.uploads:
                # In a list it arrives as a reference: the actor fetches the arrays each time the method reads them.
                actor.add_upload.remote(facts, [reference])
            session.answer(actor.start.remote(parcel.task, pack(relay.resume()), relay.interval_s))
            while True:
                for kind, args in session.answer(actor.poll.remote(_POLL_S)):
                    if kind == "done":
                        outcome: Outcome = unpack(*args)
                        return outcome
                    if kind == "failed":
                        _raise(*args, method=parcel.task.name)
                    relay.deliver(kind, args)
        finally:
            if ray.is_initialized():
                ray.kill(actor)

    def _new_actor(self, session: _Session, device: str) -> Any:
        share = 0.0 if device == "cpu" else self.num_gpus
        if share is None:
            free = session.ray.available_resources().get("GPU", 0.0)
            share = min(1.0, math.floor(free * 1e4) / 1e4)
        if device == "cuda" and not share:
            raise NoRoomError("Ray has no free GPU")
        # num_cpus: Flower's simulated clients may hold every CPU; an actor that asks for one could wait for ever.
        actor = session.ray.remote(_actor_class()).options(num_cpus=0, num_gpus=share, max_restarts=0)
        return actor.remote(LIBRARY, session.paths)

    def _check_code(self, session: _Session, actor: Any) -> None:
        try:
            digest, folder = session.answer(actor.open.remote(), self.wait_s)
        except TimeoutError as error:
            raise NoRoomError(f"Ray had no room for an actor within {self.wait_s:g} s") from error
        own_digest, own_folder = session.code
        if digest != own_digest:
            meanwhile = "; it was edited meanwhile" if folder == own_folder else ""
            raise ComputeError(f"the Ray actor runs other code, {folder}, than the driver, {own_folder}{meanwhile}")


def _actor_class() -> type:
    """Return the actor's class; local, so that Ray pickles it by value: the actor cannot import this library yet."""

    class Actor:
        def __init__(self, library: str, paths: tuple[str, ...]) -> None:
            import os
            import sys

            # The driver's order: Ray puts the working directory first, which may hold another copy of this library.
            found = [path for path in paths if os.path.exists(path)]  # noqa: PTH110
            sys.path[:] = found + [path for path in sys.path if path not in found]
            self.library = library

        def open(self) -> tuple[str, str]:
            import importlib

            module = importlib.import_module(f"{self.library}.compute.worker")
            self.worker = module.Worker()
            code: tuple[str, str] = module.code_digest()
            return code

        def add_upload(self, facts: Any, references: list[Any]) -> None:
            import ray

            self.worker.add_upload(facts, lambda: ray.get(references[0]))

        def start(self, task: Any, snapshot: Any, interval_s: float) -> None:
            self.worker.start(task, snapshot, interval_s)

        def poll(self, wait_s: float) -> Any:
            return self.worker.poll(wait_s)

    return Actor


def _facts(upload: Upload) -> dict[str, Any]:
    return {field.name: getattr(upload, field.name) for field in fields(upload) if field.name != "read"}


def _raise(failure: Failure, *, method: str) -> NoReturn:
    if not failure.kind:
        _log.error("the traceback in the Ray actor:\n%s", failure.trace)
    raise failure.error(method) from RuntimeError(failure.trace)
