"""A Ray that the library starts refuses the other processes of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

pytest.importorskip("ray")

OWNER = """
import subprocess, sys
from strategies.compute.ray_actors import RayActors
with RayActors().session(lambda: None):
    import ray
    address = ray.get_runtime_context().gcs_address
    stranger = {key: value for key, value in __import__("os").environ.items() if not key.startswith("RAY_AUTH")}
    print("members", len(ray.nodes()), flush=True)
    done = subprocess.run([sys.executable, "-c", sys.argv[1], address], env=stranger, capture_output=True, text=True)
    print("joined" if done.returncode == 0 else "refused", "token" in done.stderr, flush=True)
"""
STRANGER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"


def test_process_without_the_token_is_refused() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}

    done = subprocess.run(
        [sys.executable, "-c", OWNER, STRANGER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.stdout.splitlines() == ["members 1", "refused True"], done.stderr[-2000:]
