"""What Ray may raise, said by a stand-in for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strategies.compute.ray_start import NoRoomError, start_ray


class FakeRayError(Exception):
    """Ray's own."""


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
