"""Random numbers: every draw of a run follows from one seed, and the caller's random state is never touched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *path: str | int) -> int:
    """Return the seed of one use, so that uses never share a stream and never depend on each other's order.

    Args:
        seed: The seed of the run.
        *path: What the numbers are for, for example ``("client", "client-003", "shuffle")``.

    Returns:
        An integer in ``[0, 2**63)``; equal on every machine and Python version.
    """
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """Return a CPU ``torch.Generator`` seeded by :func:`derive_seed`."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *path))


@contextmanager
def seeded_torch(seed: int, *path: str | int) -> Iterator[None]:
    """Seed torch's global state for a block and restore it after.

    For what torch draws from its global state and cannot be handed a generator: initialisation and dropout.
    """
    import torch

    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, *path))
        yield
