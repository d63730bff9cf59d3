"""The length of OpenMP's waiting loop, as every process of the app sets it before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_app.openmp import SPINS

ROOT = Path(__file__).parents[3]

# The settings at the import of torch; the test only watches for torch, which saves its seconds. Every module starts
# from the same environment, with none of the app's modules loaded.
PROGRAM = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(module, os.environ.get("GOMP_SPINCOUNT"))
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
    ("own", "seen"), [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_a_process_of_the_app_waits_briefly_unless_its_environment_says_how(own: dict[str, str], seen: str) -> None:
    given = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES],
        cwd=ROOT, env=given | own, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.split("\n")[:-1] == [f"{module} {seen}" for module in MODULES]
