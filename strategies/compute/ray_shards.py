"""Shard actors, which hold some of the members each. The plan decides their number; the caller passes Ray in.

The driver creates them when the method needs its teachers, and streams the uploads into them. It reads one upload from
the disk and puts it into the object store; the shard loads it, and the reference is dropped. From then on the method's
actor calls the shards itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import ComputeError
from .ray_start import NoRoomError
from .task import LIBRARY, pack

if TYPE_CHECKING:
    from ..method import Job, Upload
    from ..teacher.sharded import Array, ShardAnswer, ShardRequest
    from .ray_start import Session
    from .worker import Failure, Relay


_log = logging.getLogger(__name__)


class ShardLostError(ComputeError):
    """A shard's process died; its members can be loaded again."""


@dataclass(frozen=True)
class RayShard:
    """A shard in another process, see :class:`strategies.teacher.sharded.Shard`."""

    ray: Any
    actor: Any

    def forward(self, images: Any, request: ShardRequest) -> Callable[[], ShardAnswer]:
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
        builders: Architecture -> the pickle of its builder.
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
        wait_s: Seconds that they may take to start.
    """

    def __init__(self, session: Session, wait_s: float) -> None:
        self._session, self._wait_s = session, wait_s
        self._actors: list[Any] = []
        self._plan: ShardPlan | None = None

    def load(self, loading: Loading, plan: ShardPlan, relay: Relay) -> list[Loaded]:
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

    def _load(self, loading: Loading, plan: ShardPlan, relay: Relay) -> list[Loaded]:
        from ..teacher.shard import divide_evenly

        parts = divide_evenly(len(loading.uploads), plan.shards)
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

    def _start(self, plan: ShardPlan, relay: Relay) -> None:
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


# The number and the places of the teachers' shards, which the driver derives from Ray's view of the cluster.


# The free memory of a device that teachers need, as a multiple of the bytes of their weights. It covers an upload
# beside its module while it loads, and the activations of some members for the backward pass.
FACTOR = 2.0
# A shard's share of a GPU where each GPU has one, and the rest of it for the method's own actor.
SHARD_SHARE = 0.9
METHOD_SHARE = 0.1


@dataclass(frozen=True)
class ShardPlan:
    """The places of the members.

    Attributes:
        shards: The number of shards; 1: no shard, but the method's own process.
        nodes: Ids of the nodes that host the shards without a GPU, in turn.
    """

    shards: int
    reason: str = field(default="", compare=False)  # it names the free memory, which two equal plans may differ in
    num_gpus: float = 0.0
    nodes: tuple[str, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether the plan has shards."""
        return self.shards > 1

    @property
    def per_node(self) -> int:
        """The most shards that share the cores of one node."""
        return 1 if self.num_gpus or not self.nodes else math.ceil(self.shards / len(self.nodes))

    def options(self, ray: Any) -> list[dict[str, Any]]:
        """Return the options of each shard's actor."""
        # num_cpus: Flower's simulated clients may hold every CPU, and an actor that needs one could wait forever.
        if self.num_gpus or not self.nodes:
            return [{"num_cpus": 0, "num_gpus": self.num_gpus, "scheduling_strategy": "SPREAD"}] * self.shards
        # "SPREAD" counts requested resources, and these actors request none.
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return [
            {
                "num_cpus": 0,
                "num_gpus": 0,
                "scheduling_strategy": on_node(self.nodes[number % len(self.nodes)], soft=True),
            }
            for number in range(self.shards)
        ]


def plan_shards(ray: Any, job: Job, shards: int) -> ShardPlan:
    """Plan the shards of a job.

    Args:
        shards: 0: choose; 1: none; else this many, but not more than members.
    """
    members = len(job.uploads)
    if shards == 1 or members < 2:
        return ShardPlan(1)
    nodes, gpus = _nodes(ray), 0 if job.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    if shards > 1:
        return _place_shards(min(shards, members), f"setting 'shards' is {shards}", nodes, gpus)
    if gpus > 1:
        return _place_shards(min(gpus, members), f"there are {gpus} GPUs", nodes, gpus)
    needed, free = teacher_bytes(job), _free_bytes(gpus)
    if needed <= free:
        return ShardPlan(1)
    says = f"{members} teachers need {_gib(needed)}, and {_gib(free)} are free on one device"
    rooms = sorted((room for room in nodes.values() if room), reverse=True)
    if gpus or sum(rooms) < needed or len(rooms) < 2:
        return ShardPlan(1, f"{says}; the cluster has no other devices with room")
    count = next(n for n in range(2, len(rooms) + 1) if rooms[n - 1] * n >= needed or n == len(rooms))
    return _place_shards(min(count, members), says, nodes, 0)


def teacher_bytes(job: Job) -> int:
    """Estimate the memory of all uploads as teachers on one device: their weights times :data:`FACTOR`."""
    from ..core.seeds import build_module

    sizes: dict[str, int] = {}
    for name in {upload.architecture for upload in job.uploads}:
        model = build_module(job.builders[name])
        sizes[name] = sum(tensor.nbytes for tensor in model.state_dict().values())
    return int(FACTOR * sum(sizes[upload.architecture] for upload in job.uploads))


def method_share(plan: ShardPlan, own: float | None) -> float | None:
    """Return the GPU share of the method's own actor.

    Args:
        own: The share that the caller wants; None for the free share.
    """
    return METHOD_SHARE if own is None and plan.sharded and plan.num_gpus else own


def _place_shards(shards: int, reason: str, nodes: Mapping[str, float], gpus: int) -> ShardPlan:
    # Ray counts in ten-thousandths; rounded up, the last of seven shards would find no room.
    share = math.floor(SHARD_SHARE / math.ceil(shards / gpus) * 1e4) / 1e4 if gpus else 0.0
    return ShardPlan(shards, reason, share, tuple(nodes))


def _nodes(ray: Any) -> dict[str, float]:
    """Return id -> bytes available to Ray, of the living nodes; the largest first."""
    found = {
        node["NodeID"]: float(node["Resources"].get("memory", 0)) for node in ray.nodes() if node.get("Alive", False)
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _free_bytes(gpus: int) -> int:
    """Return the free memory of the teachers' device; unlimited for a GPU that this process does not see.

    Without a GPU it is this machine's memory; the machines of a joined cluster are assumed to be no smaller.
    """
    import torch

    if gpus:
        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 2**62
    import psutil

    return int(psutil.virtual_memory().available)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
