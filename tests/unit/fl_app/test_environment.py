"""What every process of the app sets in its environment before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_app.environment import KEPT, SPINS

ROOT = Path(__file__).parents[3]

# The settings at the import of torch; the test only watches for torch, which saves its seconds. Every module starts
# from the same environment, with none of the app's modules loaded.
PROGRAM = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(module, os.environ.get("GOMP_SPINCOUNT"), os.environ.get("MALLOC_TRIM_THRESHOLD_"))
            raise ImportError

sys.meta_path.insert(0, Watch())
given = dict(os.environ)
for module in sys.argv[1:]:
    os.environ.clear()
    os.environ.update(given)
    for name in list(sys.modules):
        if name.split(".")[0] in {"strategies", "fl_app", "client_app", "server_app"}:
            del sys.modules[name]
    try:
        __import__(module)
    except ImportError:
        pass
"""
MODULES = ("server_app.launch.run_command", "server_app.app", "client_app.work")


@pytest.mark.parametrize(
    ("own", "spins", "kept"),
    [
        ({}, SPINS, KEPT),
        ({"GOMP_SPINCOUNT": "7"}, "7", KEPT),
        ({"OMP_WAIT_POLICY": "passive"}, None, KEPT),
        ({"MALLOC_TRIM_THRESHOLD_": "9"}, SPINS, "9"),
        ({"MALLOC_ARENA_MAX": "1"}, SPINS, None),
    ],
)
def test_a_process_of_the_app_sets_what_its_environment_does_not(
    own: dict[str, str], spins: str | None, kept: str | None
) -> None:
    set_by_us = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MALLOC_")
    given = {name: value for name, value in os.environ.items() if not name.startswith(set_by_us)}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES],
        cwd=ROOT, env=given | own, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.split("\n")[:-1] == [f"{module} {spins} {kept}" for module in MODULES]
