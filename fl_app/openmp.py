"""How long OpenMP threads wait for each other in a loop, which keeps a core from every other process."""

from __future__ import annotations

import os

# Turns of GNU OpenMP's waiting loop before a thread sleeps. With its default, 300,000, a server stage of two threads
# takes up to four times as long beside another busy process. A tenth of them costs nothing on an idle machine.
SPINS = "30000"


def wait_briefly() -> None:
    """Set the length of OpenMP's waiting loop, unless the caller's environment sets a wait policy.

    OpenMP reads it once, when torch is loaded: call this before. Child processes inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
