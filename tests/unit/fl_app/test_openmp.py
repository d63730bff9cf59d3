"""The length of OpenMP's waiting loop, as every process of the app sets it before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_app.openmp import SPINS

ROOT = Path(__file__).parents[3]

# The settings at the import of torch; the test only watches for torch, which saves its seconds.
PROGRAM = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()

sys.meta_path.insert(0, Watch())
import {module}
"""


@pytest.mark.parametrize("module", ["server_app.launch.run_command", "server_app.app", "client_app.work"])
@pytest.mark.parametrize(
    ("own", "seen"), [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_a_process_of_the_app_waits_briefly_unless_its_environment_says_how(
    module: str, own: dict[str, str], seen: str
) -> None:
    given = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        cwd=ROOT, env=given | own, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.strip() == seen
