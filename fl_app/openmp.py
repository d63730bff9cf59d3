"""How long the threads of one computation wait for each other in a loop, which takes a core from everyone else."""

from __future__ import annotations

import os

# Turns of GNU OpenMP's waiting loop before a thread sleeps. Its own 300,000 make a server stage of two threads up to
# four times as long where another process works too; a tenth of them costs nothing where none does.
SPINS = "30000"


def wait_briefly() -> None:
    """Set the length of OpenMP's waiting loop, unless the caller's environment says how to wait.

    It is read once, when torch is loaded: call it before. Processes that are started later inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
