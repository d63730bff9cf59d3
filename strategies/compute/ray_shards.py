"""Shard actors, which hold some of the members each. The plan decides their number; the caller passes Ray in.

The driver creates them when the method needs its teachers, and streams the uploads into them. It reads one upload from
the disk and puts it into the object store; the shard loads it, and the reference is dropped. From then on the method's
actor calls the shards itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import ComputeError
from .by_value import LIBRARY
from .packing import pack
from .ray_start import NoRoomError

if TYPE_CHECKING:
    from ..method import Upload
    from ..teacher.sharded import Answer, Array, Request
    from .relay import Relay
    from .session import Session
    from .shard_plan import Plan
    from .worker import Failure

_log = logging.getLogger(__name__)


class ShardLostError(ComputeError):
    """A shard's process died; its members can be loaded again."""


@dataclass(frozen=True)
class RayShard:
    """A shard in another process, see :class:`strategies.teacher.sharded.Shard`.

    Attributes:
        ray: The module.
        actor: The shard's actor.
    """

    ray: Any
    actor: Any

    def forward(self, images: Any, request: Request) -> Callable[[], Answer]:
        """Start a forward pass; ``images`` is a reference to the object store."""
        return partial(self._got, self.actor.forward.remote(images, request))

    def backward(self, ticket: int, logits: Array, watched: Array | None) -> Callable[[], Array | None]:
        """Start a backward pass."""
        return partial(self._got, self.actor.backward.remote(ticket, logits, watched))

    def _got(self, reference: Any) -> Any:
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.ObjectLostError) as error:
            # The last error: the shard's node ended after the shard had answered, and the answer with it.
            raise ShardLostError(f"a shard of the teachers died: {error}") from error


@dataclass(frozen=True)
class Loading:
    """The members that a method loads into its shards.

    Attributes:
        uploads: The members, in order.
        builders: Architecture -> the pickle of its builder.
        device: The job's device.
        threads: Torch threads of the job.
        fold: See :meth:`strategies.teacher.ensemble.Ensemble.from_uploads`.
        precision: See the same.
    """

    uploads: Sequence[Upload]
    builders: dict[str, bytes]
    device: str
    threads: int
    fold: bool
    precision: str


# Of a loaded shard: its actor, its number of members, and whether one of them keeps batch-normalisation statistics.
Loaded = tuple[Any, int, bool]


class ShardActors:
    """The shard actors of a method's actor; the first load creates them.

    Args:
        session: The Ray that they run in.
        wait_s: Seconds that they may take to start.
    """

    def __init__(self, session: Session, wait_s: float) -> None:
        self._session, self._wait_s = session, wait_s
        self._actors: list[Any] = []
        self._plan: Plan | None = None

    def load(self, loading: Loading, plan: Plan, relay: Relay) -> list[Loaded]:
        """Load members into shards; start new shards where the plan has none yet.

        Raises:
            NoRoomError: Ray had no room for them in time.
            ShardLostError: A shard died.
            OneShotError: A shard refused an upload.
        """
        exceptions = self._session.ray.exceptions
        try:
            return self._load(loading, plan, relay)
        except (exceptions.RayActorError, exceptions.OutOfMemoryError) as error:
            raise ShardLostError(f"a shard of the teachers died: {error}") from error

    def _load(self, loading: Loading, plan: Plan, relay: Relay) -> list[Loaded]:
        from ..teacher.shard import divided

        parts = divided(len(loading.uploads), plan.shards)
        if self._actors and (plan != self._plan or not self._alive(relay)):
            self.end()
        if not self._actors:
            self._start(plan, relay)
        used = list(zip(self._actors, parts, strict=False))
        of_all = {"device": loading.device, "threads": max(1, loading.threads // plan.per_node)}
        of_all |= {"fold": loading.fold, "precision": loading.precision}
        self._all([actor.begin.remote(loading.builders, **of_all) for actor, _ in used], relay)
        self._stream(loading.uploads, used, relay)
        closed = self._all([actor.close.remote() for actor, _ in used], relay)
        return [
            (actor, part.stop - part.start, statistics) for (actor, part), statistics in zip(used, closed, strict=True)
        ]

    def end(self) -> None:
        """Kill the shard actors."""
        actors, self._actors = self._actors, []
        if actors and self._session.lasts():
            for actor in actors:
                self._session.ray.kill(actor)

    def _start(self, plan: Plan, relay: Relay) -> None:
        ray, session = self._session.ray, self._session
        new = ray.remote(session.shard).options
        self._plan = plan
        for options in plan.options(ray):
            self._actors.append(new(max_restarts=0, **options).remote(LIBRARY, session.paths))
        try:
            codes = [session.answer(actor.open.remote(), relay.tick, self._wait_s) for actor in self._actors]
        except TimeoutError as error:
            self.end()
            raise NoRoomError(f"Ray had no room for {plan.shards} shards within {self._wait_s:g} s") from error
        for code in codes:
            session.check_code(code)

    def _alive(self, relay: Relay) -> bool:
        exceptions = self._session.ray.exceptions
        try:
            for actor in self._actors:
                self._session.answer(actor.ping.remote(), relay.tick, self._wait_s)
        except (exceptions.RayActorError, TimeoutError):
            return False
        return True

    def _stream(self, uploads: Sequence[Upload], used: Sequence[tuple[Any, slice]], relay: Relay) -> None:
        """Send each shard its uploads, one at a time: the object store holds at most one upload per shard."""
        ray, under_way = self._session.ray, dict[int, Any]()
        for turn in range(max((part.stop - part.start for _, part in used), default=0)):
            for number, (actor, part) in enumerate(used):
                if number in under_way:
                    self._all([under_way.pop(number)], relay)
                if part.start + turn < part.stop:
                    upload = uploads[part.start + turn]
                    relay.tick()
                    # In a list it arrives as a reference, which the shard drops with the weights.
                    under_way[number] = actor.add.remote(upload.facts, [ray.put(pack(upload.read(), copy=False))])
        self._all(list(under_way.values()), relay)

    def _all(self, references: Sequence[Any], relay: Relay) -> list[Any]:
        from .worker import Failure

        answers = [self._session.answer(reference, relay.tick) for reference in references]
        for answer in answers:
            if isinstance(answer, Failure):
                _raise(answer)
        return answers


def _raise(failure: Failure) -> None:
    if not failure.kind:
        _log.error("the traceback in the shard:\n%s", failure.trace)
    raise failure.error("teachers") from RuntimeError(failure.trace)
