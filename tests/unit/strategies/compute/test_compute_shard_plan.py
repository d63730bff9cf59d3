"""Where the teachers go, for clusters that a stand-in for Ray describes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strategies.compute import ray_shards
from strategies.compute.ray_shards import FACTOR, method_share, plan_shards
from strategies.core.facts import UploadFacts
from strategies.method import Job, Normalization, Upload

BYTES = 65 * 4


def cluster(*memory: float, gpus: float = 0) -> Any:
    """A cluster with these bytes of memory on its nodes."""
    nodes = [
        {"NodeID": f"node-{number}", "Alive": True, "Resources": {"memory": room}} for number, room in enumerate(memory)
    ]
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    return SimpleNamespace(
        nodes=lambda: [*nodes, {"NodeID": "gone", "Alive": False, "Resources": {"memory": 1e15}}],
        cluster_resources=lambda: {"GPU": gpus} if gpus else {},
        util=SimpleNamespace(scheduling_strategies=strategies),
    )


def job(count: int, device: str = "auto") -> Job:
    uploads = tuple(Upload(UploadFacts(f"c{n}", "linear"), dict) for n in range(count))
    return Job(uploads, {"linear": lambda: torch.nn.Linear(64, 1)}, "linear", 2, (1, 8, 8), Normalization((0.5,), (0.5,)), None, device=device)  # fmt: skip  # noqa: E501


def test_plan_of_teachers_that_do_not_fit_takes_as_many_nodes_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = FACTOR * 8 * BYTES
    monkeypatch.setattr(ray_shards, "_free_bytes", lambda _: int(needed - 1))
    plan = plan_shards(cluster(needed / 2, needed / 3, needed), job(8), 0)
    assert plan.shards == 2
    assert plan.nodes[:2] == ("node-2", "node-0")
    assert "8 teachers need" in plan.reason
    assert plan_shards(cluster(*[needed / 4] * 5), job(8), 0).shards == 4


def test_plan_with_several_gpus_has_a_shard_on_each_and_leaves_room_for_the_method() -> None:
    plan = plan_shards(cluster(1e9, gpus=3), job(8), 0)
    assert (plan.shards, plan.num_gpus, plan.reason) == (3, 0.9, "there are 3 GPUs")
    assert plan.options(cluster()) == [{"num_cpus": 0, "num_gpus": 0.9, "scheduling_strategy": "SPREAD"}] * 3
    assert method_share(plan, None) == 0.1
    assert method_share(plan, 0.5) == 0.5
    assert plan_shards(cluster(1e9, gpus=2), job(8), 4).num_gpus == 0.45
    # Without a GPU of its own a job has its shards on the nodes.
    assert plan_shards(cluster(1e9, gpus=2), job(8, "cpu"), 4).num_gpus == 0


@pytest.mark.parametrize("shards", [3, 7, 14, 59])
def test_shares_of_one_gpu_leave_room_for_every_shard_and_the_method(shards: int) -> None:
    plan = plan_shards(cluster(1e9, gpus=1), job(60), shards)
    units = [round(share * 10_000) for share in (plan.num_gpus, method_share(plan, None) or 0.0)]  # as Ray counts
    assert units[0] * shards + units[1] <= 10_000


def test_plan_of_a_setting_deals_shards_to_the_nodes_and_has_no_more_than_members() -> None:
    ray = cluster(1e9, 2e9)
    plan = plan_shards(ray, job(8), 3)
    assert [options["scheduling_strategy"] for options in plan.options(ray)] == [
        ("node-1", True), ("node-0", True), ("node-1", True)
    ]  # fmt: skip
    assert plan.per_node == 2
    assert plan.reason == "setting 'shards' is 3"
    assert plan_shards(ray, job(2), 5).shards == 2
    assert not plan_shards(ray, job(1), 5).sharded
