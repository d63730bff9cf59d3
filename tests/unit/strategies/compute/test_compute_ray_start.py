"""What Ray may raise, said by a stand-in for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strategies.compute.ray_shards import RayShard, ShardLostError
from strategies.compute.ray_start import NoRoomError, start_ray
from strategies.teacher.sharded import Request


class FakeRayError(Exception):
    """Ray's own."""


class LostError(FakeRayError):
    """One of those that mean that a process or its node is gone."""


def raising(error: Exception) -> Any:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def ray_that_raises(error: Exception) -> Any:
    kinds = dict.fromkeys(("RayActorError", "OutOfMemoryError", "ObjectLostError"), type("Other", (FakeRayError,), {}))
    return SimpleNamespace(
        init=raising(error),
        get=raising(error),
        exceptions=SimpleNamespace(RayError=FakeRayError, **kinds),
        _private=SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True)),
    )


@pytest.mark.parametrize(
    "error",
    [Exception("The current node timed out during startup."), RuntimeError("no"), OSError("no"), FakeRayError("no")],
)
def test_start_when_ray_does_not_start_says_so_and_leaves_the_job_to_this_process(error: Exception) -> None:
    ray = ray_that_raises(error)
    with pytest.raises(NoRoomError, match=f"Ray does not start: {error}"):
        start_ray(ray, "")
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER


def test_start_when_the_call_itself_is_wrong_hides_nothing() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        start_ray(ray_that_raises(TypeError("unexpected keyword")), "")


@pytest.mark.parametrize("kind", ["RayActorError", "OutOfMemoryError", "ObjectLostError"])
def test_a_shard_when_it_or_its_answer_is_gone_is_lost(kind: str) -> None:
    ray = ray_that_raises(LostError("the node died"))
    setattr(ray.exceptions, kind, LostError)
    actor = SimpleNamespace(forward=SimpleNamespace(remote=lambda *_: "reference"))
    with pytest.raises(ShardLostError, match="a shard of the teachers died: the node died"):
        RayShard(ray, actor).forward(None, Request(0, 1))()
