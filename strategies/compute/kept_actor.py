"""One Ray actor for many runs: made at the first, replaced if it dies. The caller passes Ray in.

Uploads, start, memory and snapshot travel with every run. Of the rest of a job, only the parts travel that changed
since the last run.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from ..core.errors import ComputeError, describe, with_remedy
from ..core.facts import UploadFacts
from ..method import Job, Method, Outcome, Upload
from .ray_shards import Loading, ShardActors, ShardLostError, ShardPlan, method_share, plan_shards
from .ray_start import ActorTerms, NoRoomError, Session
from .task import LIBRARY, ActorTask, SentParts, pack, unpack
from .threads import steady_threads
from .worker import Failure, Relay

_log = logging.getLogger(__name__)

# The most seconds that an actor waits for an event to report.
_POLL_S = 10.0
# The most seconds to wait for an actor's end.
_DEATH_S = 5.0


@dataclass(frozen=True)
class _Parcel:
    """A task, its packed uploads, and their sources in this process.

    Attributes:
        task: The task.
        uploads: The facts of each upload, and the reference to its packed weights in Ray's object store. The list is
            empty where the actor fetches the weights on demand.
        job: The job.
        plan: The plan of its teachers' shards.
    """

    task: ActorTask
    uploads: tuple[tuple[UploadFacts, list[Any]], ...]
    job: Job
    plan: ShardPlan


class KeptActor:
    """An actor that serves many runs, one at a time; the first run creates it.

    Args:
        session: The Ray that it runs in.
        terms: Its resources and limits.
    """

    def __init__(self, session: Session, terms: ActorTerms) -> None:
        self._session, self._terms = session, terms
        self._actor: Any = None
        self._granted: tuple[bool, float | None] = (False, None)
        self._shards = ShardActors(session, terms.wait_s)
        self._sent = SentParts()

    def run(self, method: Method, job: Job, relay: Relay) -> Outcome:
        """Run a method on a job; see :meth:`.ray_actors.RayActors.run`."""
        ray = self._session.ray
        parcel = self._parcel(method, job, relay)
        deaths, most = 0, self._terms.max_restarts
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
        task, plan = ActorTask.of(method, job, ray.cloudpickle), plan_shards(ray, job, self._terms.shards)
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
        granted = (device != "cpu", method_share(parcel.plan, self._terms.num_gpus))
        if self._actor is not None and (granted != self._granted or not self._answers(relay)):
            self.end()
        if self._actor is None:
            self._actor, self._granted = self._new_actor(device, granted[1]), granted
            self._check_code(relay)

    def _answers(self, relay: Relay) -> bool:
        exceptions = self._session.ray.exceptions
        try:
            self._session.answer(self._actor.poll.remote(0.0), relay.tick, self._terms.wait_s)
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
        wait_s = self._terms.wait_s
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
