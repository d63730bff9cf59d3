"""Runs a job in a Ray actor, so that it takes a GPU of a simulation, of one server, or of a cluster.

Only the driver touches files. Uploads go to the actor through the object store, one at a time. The method's calls of
its Progress come back as events, which the driver replays on its own Progress. No other module imports Ray.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..core.errors import ComputeError, describe, with_remedy
from ..core.facts import UploadFacts
from ..core.offline import ray_token
from ..method import Job, Method, Outcome, Progress, Upload
from ..uploads.needs import check_needs
from .in_process import InProcess
from .ray_shards import Loading, ShardActors, ShardLostError, ShardPlan, method_share, plan_shards
from .ray_start import NoRoomError, Session, start_ray
from .task import LIBRARY, ActorTask, SentParts, pack, unpack
from .threads import steady_threads
from .worker import Failure, Relay

# One Ray actor for many runs: made at the first, replaced if it dies. The caller passes Ray in.
#
# Uploads, start, memory and snapshot travel with every run. Of the rest of a job, only the parts travel that changed
# since the last run.

_log = logging.getLogger(__name__)

# The most seconds that an actor waits for an event to report.
_POLL_S = 10.0
# The most seconds to wait for an actor's end.
_DEATH_S = 5.0


@dataclass(frozen=True)
class _Parcel:
    """A task, its packed uploads, and their sources in this process.

    Attributes:
        uploads: The facts of each upload, and the reference to its packed weights in Ray's object store. The list is
            empty where the actor fetches the weights on demand.
    """

    task: ActorTask
    uploads: tuple[tuple[UploadFacts, list[Any]], ...]
    job: Job
    plan: ShardPlan


class KeptActor:
    """An actor that serves many runs, one at a time; the first run creates it."""

    def __init__(self, session: Session, place: RayActors) -> None:
        self._session, self._place = session, place
        self._actor: Any = None
        self._granted: tuple[bool, float | None] = (False, None)
        self._shards = ShardActors(session, place.wait_s)
        self._sent = SentParts()

    def run(self, method: Method, job: Job, relay: Relay) -> Outcome:
        """Run a method on a job; see :meth:`.ray_actors.RayActors.run`."""
        ray = self._session.ray
        parcel = self._parcel(method, job, relay)
        deaths, most = 0, self._place.max_restarts
        while True:
            try:
                return self._attempt(parcel, relay)
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, ShardLostError) as error:
                deaths += 1
                if deaths > most:
                    raise ComputeError(
                        with_remedy(f"method {method.name!r}: {deaths} Ray actors died, the last: {describe(error)}")
                    ) from error
                who = "a shard of the teachers" if isinstance(error, ShardLostError) else "the Ray actor"
                _log.warning("%s died; restart %d of %d from the last checkpoint", who, deaths, most)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise ComputeError(with_remedy(f"method {method.name!r} in a Ray actor: {describe(cause)}")) from error

    def reachable(self) -> bool:
        """Return whether its Ray still runs; a dead actor would be replaced."""
        return self._session.lasts()

    def end(self) -> None:
        """Kill the actor, if one exists, whatever it is doing."""
        actor, self._actor = self._actor, None
        self._sent = SentParts()
        self._shards.end()
        if actor is not None and self._session.lasts():
            self._session.ray.kill(actor)
            # Ray might first notice that the handle is gone, and then let the actor finish its run.
            self._await_death(actor)

    def _await_death(self, actor: Any) -> None:
        ray, deadline = self._session.ray, time.monotonic() + _DEATH_S
        while self._session.lasts() and time.monotonic() < deadline:
            try:
                ray.get(actor.poll.remote(0.0), timeout=_DEATH_S)
            except ray.exceptions.RayError:  # it has died, or does not answer
                return

    def _parcel(self, method: Method, job: Job, relay: Relay) -> _Parcel:
        ray = self._session.ray
        task, plan = ActorTask.of(method, job, ray.cloudpickle), plan_shards(ray, job, self._place.shards)
        if plan.reason:
            where = f"in {plan.shards} shards" if plan.sharded else "on one device"
            relay.deliver("record", ({"note": f"the clients' models are held {where}: {plan.reason}"},))

        def sent(upload: Upload) -> list[Any]:
            return [] if plan.sharded else [ray.put(pack(upload.read(), copy=False))]

        # One by one: this process keeps only references. They go with the end of this run.
        return _Parcel(task, tuple((upload.facts, sent(upload)) for upload in relay.ticking(job.uploads)), job, plan)

    def _attempt(self, parcel: _Parcel, relay: Relay) -> Outcome:
        settled = False
        try:
            self._ready(parcel, relay)
            self._start(parcel, relay)
            while True:
                for kind, args in self._session.answer(self._actor.poll.remote(_POLL_S), relay.tick):
                    if kind == "done":
                        outcome: Outcome = unpack(*args)
                        settled = True
                        return outcome
                    if kind == "failed":
                        settled = args[0].origin != ShardLostError.__name__
                        _raise(*args, method=parcel.task.name)
                    if kind == "ask":
                        self._actor.reply.remote(self._asked(parcel, relay, *args))
                    else:
                        relay.deliver(kind, args)
        finally:
            # An actor that died, or still works on this run, serves no other.
            if not settled:
                self.end()

    def _asked(self, parcel: _Parcel, relay: Relay, what: str, *args: Any) -> Any:
        """Return the answer to the method's actor: an upload's packed weights, or the shards that hold its teachers."""
        uploads = parcel.job.uploads
        if what == "read":
            return pack(uploads[args[0]].read(), copy=False)
        clients, fold, precision = args
        by_name = {upload.client: upload for upload in uploads}
        loading = Loading(
            uploads=[by_name[client] for client in clients],
            builders=parcel.task.parts["builders"],
            device=parcel.task.job.device,
            threads=steady_threads(parcel.job),
            fold=fold,
            precision=precision,
        )
        return self._shards.load(loading, parcel.plan, relay)

    def _ready(self, parcel: _Parcel, relay: Relay) -> None:
        """Ensure an actor that answers and may use the device."""
        device = parcel.task.job.device
        granted = (device != "cpu", method_share(parcel.plan, self._place.num_gpus))
        if self._actor is not None and (granted != self._granted or not self._answers(relay)):
            self.end()
        if self._actor is None:
            self._actor, self._granted = self._new_actor(device, granted[1]), granted
            self._check_code(relay)

    def _answers(self, relay: Relay) -> bool:
        exceptions = self._session.ray.exceptions
        try:
            self._session.answer(self._actor.poll.remote(0.0), relay.tick, self._place.wait_s)
        except (exceptions.RayActorError, TimeoutError):
            _log.warning("the Ray actor died since the last run: a new one replaces it")
            return False
        return True

    def _start(self, parcel: _Parcel, relay: Relay) -> None:
        for of_upload, references in parcel.uploads:
            # In a list it arrives as a reference: the actor fetches the arrays each time the method reads them.
            self._actor.add_upload.remote(of_upload, references)
        task, snapshot = parcel.task.packed(self._sent), pack(relay.resume(), copy=False)
        started = self._actor.start.remote(task, snapshot, relay.interval_s, parcel.plan.sharded)
        self._session.answer(started, relay.tick)
        self._sent.note(parcel.task.parts)

    def _new_actor(self, device: str, share: float | None) -> Any:
        ray = self._session.ray
        share = 0.0 if device == "cpu" else share
        if share is None:
            free = ray.available_resources().get("GPU", 0.0)
            share = min(1.0, math.floor(free * 1e4) / 1e4)
        if device == "cuda" and not share:
            raise NoRoomError("Ray has no free GPU")
        # num_cpus: Flower's simulated clients may hold every CPU, and an actor that needs one could wait forever.
        actor = ray.remote(self._session.actor).options(num_cpus=0, num_gpus=share, max_restarts=0)
        return actor.remote(LIBRARY, self._session.paths)

    def _check_code(self, relay: Relay) -> None:
        wait_s = self._place.wait_s
        try:
            code = self._session.answer(self._actor.open.remote(), relay.tick, wait_s)
        except TimeoutError as error:
            raise NoRoomError(f"Ray had no room for an actor within {wait_s:g} s") from error
        self._session.check_code(code)


def _raise(failure: Failure, *, method: str) -> NoReturn:
    if failure.origin == ShardLostError.__name__:
        raise ShardLostError(failure.message)
    if not failure.kind:
        _log.error("the traceback in the Ray actor:\n%s", failure.trace)
    raise failure.error(method) from RuntimeError(failure.trace)


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
            self._actor = KeptActor(session, place)
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
            self.worker: Any = self.library("worker")
            code: tuple[str, str] = self.worker.code_digest()
            return code

        def ping(self) -> None:
            pass

        def begin(self, builders: Any, **how: Any) -> Any:
            self.shard: Any = None  # its members are freed before the next come
            self.shard = self.worker.open_shard(builders, **how)
            return self.shard if isinstance(self.shard, self.worker.Failure) else None

        def add(self, facts: Any, references: list[Any]) -> Any:
            import ray

            return self.worker.add_member(self.shard, facts, ray.get(references[0]))

        def close(self) -> Any:
            return self.shard.close()

        def forward(self, images: Any, request: Any) -> Any:
            return self.shard.forward(images, request)

        def backward(self, ticket: int, logits: Any, watched: Any) -> Any:
            return self.shard.backward(ticket, logits, watched)

    return ShardActor
