"""What the processes of the app set in their environment for the libraries below torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from strategies.core.offline import unusable_proxies, without_proxy

# Turns of GNU OpenMP's waiting loop before a thread sleeps. With its default, 300,000, those that wait keep the cores
# from the one that they wait for: two threads take up to forty times as long beside other work as on idle cores.
SPINS = "1000"
# In bytes, of glibc: blocks up to the first come from the heap, where freed ones are found again; the heap keeps up to
# the second at its end. Without them each step of a generator returns its memory and waits for as many new pages, which
# is a sixth of its time.
BLOCK, KEPT = str(32 * 2**20), str(512 * 2**20)
# Names a file with variables of a simulation, whose processes begin to start before they are known.
RUN_VARIABLE = "ONESHOT_RUN"


def prepare() -> None:
    """Set the length of OpenMP's waiting loop, what glibc keeps, and that no proxy is for addresses of this machine.

    Of a simulation set the variables of its run, too.

    What the caller's environment sets stays, but for a proxy that Flower cannot use: a line names it.

    OpenMP reads it once, when torch is loaded: call this before. Child processes inherit it. glibc reads it when a
    process starts, so that it holds for child processes alone: Ray's, those of ``oneshot compare``, and Flower's.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not any(name.startswith("MALLOC_") for name in os.environ):
        os.environ.update(MALLOC_MMAP_THRESHOLD_=BLOCK, MALLOC_TRIM_THRESHOLD_=KEPT)
    if place := os.environ.get(RUN_VARIABLE):
        with suppress(FileNotFoundError):  # the run has ended
            os.environ.update(json.loads(Path(place).read_text(encoding="utf-8")))
    if any(name.lower().endswith("_proxy") for name in os.environ):
        for name, reason in unusable_proxies(os.environ).items():
            logging.getLogger(__name__).warning("%s %s: it is not used", name, reason)
        os.environ.update(without_proxy(os.environ))


@contextmanager
def variables(named: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a block."""
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
