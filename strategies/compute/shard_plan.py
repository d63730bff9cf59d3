"""The number and the places of the teachers' shards, which the driver derives from Ray's view of the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..method import Job

# The free memory of a device that teachers need, as a multiple of the bytes of their weights. It covers an upload
# beside its module while it loads, and the activations of some members for the backward pass.
FACTOR = 2.0
# A shard's share of a GPU where each GPU has one, and the rest of it for the method's own actor.
SHARD_SHARE = 0.9
METHOD_SHARE = 0.1


@dataclass(frozen=True)
class Plan:
    """The places of the members.

    Attributes:
        shards: The number of shards; 1: no shard, but the method's own process.
        reason: The reason, for the log.
        num_gpus: Each shard's share of a GPU.
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


def plan_of(ray: Any, job: Job, shards: int) -> Plan:
    """Plan the shards of a job.

    Args:
        ray: The module, connected.
        job: The job with its uploads.
        shards: 0: choose; 1: none; else this many, but not more than members.
    """
    members = len(job.uploads)
    if shards == 1 or members < 2:
        return Plan(1)
    nodes, gpus = _nodes(ray), 0 if job.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    if shards > 1:
        return _placed(min(shards, members), f"setting 'shards' is {shards}", nodes, gpus)
    if gpus > 1:
        return _placed(min(gpus, members), f"there are {gpus} GPUs", nodes, gpus)
    needed, free = teacher_bytes(job), _free_bytes(gpus)
    if needed <= free:
        return Plan(1)
    says = f"{members} teachers need {_gib(needed)}, and {_gib(free)} are free on one device"
    rooms = sorted((room for room in nodes.values() if room), reverse=True)
    if gpus or sum(rooms) < needed or len(rooms) < 2:
        return Plan(1, f"{says}; the cluster has no other devices with room")
    count = next(n for n in range(2, len(rooms) + 1) if rooms[n - 1] * n >= needed or n == len(rooms))
    return _placed(min(count, members), says, nodes, 0)


def teacher_bytes(job: Job) -> int:
    """Estimate the memory of all uploads as teachers on one device: their weights times :data:`FACTOR`."""
    from ..teacher.copies import built

    sizes: dict[str, int] = {}
    for name in {upload.architecture for upload in job.uploads}:
        model = built(job.builders[name])
        sizes[name] = sum(tensor.nbytes for tensor in model.state_dict().values())
    return int(FACTOR * sum(sizes[upload.architecture] for upload in job.uploads))


def method_share(plan: Plan, own: float | None) -> float | None:
    """Return the GPU share of the method's own actor.

    Args:
        plan: The shards beside it.
        own: The share that the caller wants; None for the free share.
    """
    return METHOD_SHARE if own is None and plan.sharded and plan.num_gpus else own


def _placed(shards: int, reason: str, nodes: Mapping[str, float], gpus: int) -> Plan:
    # Ray counts in ten-thousandths; rounded up, the last of seven shards would find no room.
    share = math.floor(SHARD_SHARE / math.ceil(shards / gpus) * 1e4) / 1e4 if gpus else 0.0
    return Plan(shards, reason, share, tuple(nodes))


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
