"""One Ray actor for many runs: made at the first, replaced where it dies. Ray itself is handed in.

Uploads, start, memory and snapshot travel with every run; of the rest of a job only what has changed since the run
before.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from ..errors import ComputeError
from ..method import Job, Method, Outcome, Upload
from .by_value import LIBRARY
from .packing import pack, unpack
from .ray_start import NoRoomError
from .relay import Relay
from .task import Sent, Task
from .worker import Failure, code_digest

_log = logging.getLogger(__name__)

# The most seconds between two calls of Progress.tick, and those that an actor waits for something to say.
_TICK_S = 0.4
_POLL_S = 10.0
# The most seconds that the end of an actor is waited for.
_DEATH_S = 5.0


@dataclass(frozen=True)
class Session:
    """Ray while it is in use.

    Attributes:
        ray: The module.
        code: (digest, folder) of this library when the session began.
        paths: Where actors find this library, in front of their own ``sys.path``.
        actor: The actor's class, for ``ray.remote``.
        name: Tells this Ray from those before and after it.
    """

    ray: Any
    code: tuple[str, str]
    paths: tuple[str, ...]
    actor: type
    name: tuple[str, str]

    @classmethod
    def of(cls, ray: Any, paths: tuple[str, ...], actor: type) -> Session:
        """Describe the Ray that runs now."""
        return cls(ray, code_digest(), paths, actor, _name_of(ray))

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


@dataclass(frozen=True)
class _Parcel:
    """A task, and its uploads in Ray's object store: the facts of each, and the reference of its packed weights."""

    task: Task
    uploads: tuple[tuple[Mapping[str, Any], Any], ...]


class KeptActor:
    """An actor that serves many runs, one at a time; there is none before the first.

    Args:
        session: Where it lives.
        terms: What it is granted.
    """

    def __init__(self, session: Session, terms: Terms) -> None:
        self._session, self._terms = session, terms
        self._actor: Any = None
        self._on_gpu = False
        self._sent = Sent()

    def run(self, method: Method, job: Job, relay: Relay) -> Outcome:
        """Run a method on a job; see :meth:`.ray_actors.RayActors.run`."""
        ray = self._session.ray
        task = Task.of(method, job, ray.cloudpickle)
        # One by one: a reference keeps nothing in this process. They go with the end of this run.
        uploads = tuple(
            (facts(upload), ray.put(pack(upload.read(), copy=False))) for upload in relay.ticking(job.uploads)
        )
        deaths, most = 0, self._terms.max_restarts
        while True:
            try:
                return self._attempt(_Parcel(task, uploads), relay)
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                deaths += 1
                if deaths > most:
                    raise ComputeError(
                        f"method {method.name!r}: {deaths} Ray actors died, the last: {error}"
                    ) from error
                _log.warning("the Ray actor died; restart %d of %d from the last checkpoint", deaths, most)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise ComputeError(f"method {method.name!r} in a Ray actor: {type(cause).__name__}: {cause}") from error

    def reachable(self) -> bool:
        """Say whether its Ray lasts; the actor itself may be dead, and would be replaced."""
        return self._session.lasts()

    def end(self) -> None:
        """Kill the actor, if there is one, whatever it is at."""
        actor, self._actor = self._actor, None
        self._sent = Sent()
        if actor is not None and self._session.lasts():
            self._session.ray.kill(actor)
            # Ray may learn first that the handle is gone, and would then let the actor finish its run before it ends.
            self._await_death(actor)

    def _await_death(self, actor: Any) -> None:
        ray, deadline = self._session.ray, time.monotonic() + _DEATH_S
        while self._session.lasts() and time.monotonic() < deadline:
            try:
                ray.get(actor.poll.remote(0.0), timeout=_DEATH_S)
            except ray.exceptions.RayError:  # it is dead, or does not answer
                return

    def _attempt(self, parcel: _Parcel, relay: Relay) -> Outcome:
        settled = False
        try:
            self._ready(parcel.task.job.device, relay)
            self._start(parcel, relay)
            while True:
                for kind, args in self._session.answer(self._actor.poll.remote(_POLL_S), relay.tick):
                    if kind == "done":
                        outcome: Outcome = unpack(*args)
                        settled = True
                        return outcome
                    if kind == "failed":
                        settled = True
                        _raise(*args, method=parcel.task.name)
                    relay.deliver(kind, args)
        finally:
            # One that died, or is still at work on this run, serves no other.
            if not settled:
                self.end()

    def _ready(self, device: str, relay: Relay) -> None:
        """See to it that there is an actor that answers, and may use the device."""
        on_gpu = device != "cpu"
        if self._actor is not None and (on_gpu != self._on_gpu or not self._answers(relay)):
            self.end()
        if self._actor is None:
            self._actor, self._on_gpu = self._new_actor(device), on_gpu
            self._check_code(relay)

    def _answers(self, relay: Relay) -> bool:
        exceptions = self._session.ray.exceptions
        try:
            self._session.answer(self._actor.poll.remote(0.0), relay.tick, self._terms.wait_s)
        except (exceptions.RayActorError, TimeoutError):
            _log.warning("the Ray actor died since the last run; another takes its place")
            return False
        return True

    def _start(self, parcel: _Parcel, relay: Relay) -> None:
        for of_upload, reference in parcel.uploads:
            # In a list it arrives as a reference: the actor fetches the arrays each time the method reads them.
            self._actor.add_upload.remote(of_upload, [reference])
        task, snapshot = parcel.task.packed(self._sent), pack(relay.resume(), copy=False)
        self._session.answer(self._actor.start.remote(task, snapshot, relay.interval_s), relay.tick)
        self._sent.note(parcel.task.parts)

    def _new_actor(self, device: str) -> Any:
        ray, share = self._session.ray, 0.0 if device == "cpu" else self._terms.num_gpus
        if share is None:
            free = ray.available_resources().get("GPU", 0.0)
            share = min(1.0, math.floor(free * 1e4) / 1e4)
        if device == "cuda" and not share:
            raise NoRoomError("Ray has no free GPU")
        # num_cpus: Flower's simulated clients may hold every CPU; an actor that asks for one could wait for ever.
        actor = ray.remote(self._session.actor).options(num_cpus=0, num_gpus=share, max_restarts=0)
        return actor.remote(LIBRARY, self._session.paths)

    def _check_code(self, relay: Relay) -> None:
        wait_s = self._terms.wait_s
        try:
            digest, folder = self._session.answer(self._actor.open.remote(), relay.tick, wait_s)
        except TimeoutError as error:
            raise NoRoomError(f"Ray had no room for an actor within {wait_s:g} s") from error
        own_digest, own_folder = self._session.code
        if digest != own_digest:
            meanwhile = "; it was edited meanwhile" if folder == own_folder else ""
            raise ComputeError(f"the Ray actor runs other code, {folder}, than the driver, {own_folder}{meanwhile}")


def _name_of(ray: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def facts(upload: Upload) -> dict[str, Any]:
    """Return the fields of an upload but ``read``."""
    return {field.name: getattr(upload, field.name) for field in fields(upload) if field.name != "read"}


def _raise(failure: Failure, *, method: str) -> NoReturn:
    if not failure.kind:
        _log.error("the traceback in the Ray actor:\n%s", failure.trace)
    raise failure.error(method) from RuntimeError(failure.trace)
