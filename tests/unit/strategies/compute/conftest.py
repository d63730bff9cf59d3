"""What holds for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def narrow_generators() -> None:
    """Leave the generators as wide as they are: processes of their own see no fixture."""


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Start a Ray of this machine, one for a file."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()
