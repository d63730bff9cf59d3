"""Random numbers: every draw of a run follows from one seed, and the caller's random state never changes.

Noise for differential privacy is the exception: it comes from the operating system's entropy. The server knows the
run's seed, so it could draw the same noise and subtract it, and torch's own generators use only 32 bits of a seed,
which an attacker could search.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .facts import ModelBuilder


def derive_seed(seed: int, *path: str | int) -> int:
    """Return the seed of one use, so that uses share no stream and do not depend on their order.

    Args:
        *path: The use, for example ``("client", "client-003", "shuffle")``.

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
    """Seed torch's global random state for a block and restore it after.

    Initialisation and dropout need it, because they draw from the global state and take no generator.
    """
    import torch

    devices, derived = list(range(torch.cuda.device_count())), derive_seed(seed, *path)
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed, which formats the whole stack at each call on a machine without a GPU.
        torch.default_generator.manual_seed(derived)
        if devices:
            torch.cuda.manual_seed_all(derived)
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(derived)
        yield


def build_module(builder: ModelBuilder) -> nn.Module:
    """Return a module whose weights the caller overwrites; the caller's random state does not change."""
    with seeded_torch(0, "member"):
        return builder()


def initial_torch(seed: int, architecture: str, *client: str) -> AbstractContextManager[None]:
    """Seed torch for the start weights of an architecture, which the server can draw as the clients do.

    Args:
        client: The client, where each has weights of its own.
    """
    return seeded_torch(seed, "init", architecture, *client)


def system_uniform(*shape: int) -> torch.Tensor:
    """Return random numbers from the operating system's entropy: uniform in (0, 1], float64 [*shape]."""
    import numpy as np
    import torch

    words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
    numbers = ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
    return torch.from_numpy(numbers).reshape(shape)


def system_normal(*shape: int) -> torch.Tensor:
    """Return random numbers from the operating system's entropy: standard normal (Box-Muller), float64 [*shape].

    Each number comes from 106 random bits, so that the tails are finely spaced too. The last digits of floating-point
    noise still tell the exact number beneath it (Mironov, On Significance of the Least Significant Bits for
    Differential Privacy, 2012): the caller must round the sum of both.
    """
    import torch

    count = math.prod(shape)
    pairs = -(-count // 2)
    radius, angle = torch.sqrt(-2.0 * torch.log(system_uniform(pairs))), 2.0 * math.pi * system_uniform(pairs)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count].reshape(shape)
