"""A Ray that the library starts has a token: the variables are there before Ray is imported, which reads them once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.core.offline import ray_token

SESSION = """
from strategies.compute.ray_actors import RayActors
from strategies.compute.ray_start import NoRoomError
try:
    with RayActors().session(lambda: None):
        pass
except NoRoomError:
    print("no Ray")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "mode"), [({}, "token 64"), ({"RAY_AUTH_MODE": "disabled"}, "disabled 0")])
def test_token_is_in_the_environment_before_ray_is_imported(tmp_path: Path, given: dict[str, str], mode: str) -> None:
    names = '"RAY_AUTH_MODE"'
    text = f'import os\nprint(os.environ[{names}], len(os.environ.get("RAY_AUTH_TOKEN", "")))\nraise ImportError\n'
    (tmp_path / "ray.py").write_text(text)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment = {**plain, "PYTHONPATH": str(tmp_path), **given}

    done = subprocess.run([sys.executable, "-c", SESSION], env=environment, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == [mode, "no Ray"], done.stderr[-2000:]


def test_cluster_of_the_user_keeps_its_own_mode() -> None:
    assert ray_token({"RAY_ADDRESS": "ray.example.org:6379"}) == {}
    assert ray_token({"RAY_AUTH_MODE": "disabled"}) == {}
    assert ray_token({})["RAY_AUTH_TOKEN"] != ray_token({})["RAY_AUTH_TOKEN"]
