"""What costs a CPU time beside the computation: memory that is mapped anew, subnormal numbers, cores that are shared.

glibc maps every block above 32 MiB anew and unmaps it when it is freed. A step of CNN5 on 128 images frees and
allocates a gigabyte of such blocks, and the kernel clears all their pages each time. That takes a quarter of the step,
in local training and on the server. Kept memory is not returned to the kernel between training steps.

A CPU takes up to 150 times as long for a subnormal float32, one below 1.2e-38. A trained model needs none. An upload of
them would slow the server, and a server's model of them its clients.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ARITHMETICS = ("auto", "float32", "bfloat16")
# Each makes bfloat16 faster than float32: two sets of x86's instructions, and ARM's.
_IN_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")

# Names and numbers of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4

_NEVER = 2**31 - 1
# The values that glibc reaches by itself once it has freed large blocks; its lower initial values cannot be restored.
_USUAL = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in the process during a block and release it after; without glibc on Linux do nothing.

    It changes no result. It holds for the whole process, so that such blocks must not overlap. Outside the main thread,
    memory blocks from 64 MiB on are kept only in a process that was started with ``MALLOC_ARENA_MAX=1``.
    """
    mallopt, malloc_trim = _allocator()
    if mallopt is None or malloc_trim is None:
        yield
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        for name, value in _USUAL.items():
            mallopt(name, value)
        malloc_trim(0)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage during a block of imports, which make many objects and no garbage.

    Torch and what comes with it take a fifth less time.
    """
    import numpy  # noqa: F401  torch would import it, and then drop a Ctrl-C that comes meanwhile

    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def flush_subnormals(*, wanted: bool = True) -> Iterator[None]:
    """Take subnormal numbers for zero during a block, in the calling thread and in the workers that it starts.

    Workers that it started earlier keep theirs, so that a process begins with this block.

    Args:
        wanted: False: take them as they are, inside another block.
    """
    import torch

    smallest_normal = torch.full((), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    kept = bool(smallest_normal / 2)
    torch.set_flush_denormal(wanted)
    try:
        yield
    finally:
        torch.set_flush_denormal(not kept)


def in_bfloat16(chosen: str, device: str) -> bool:
    """Return whether a device computes in bfloat16.

    Args:
        chosen: One of :data:`ARITHMETICS`. ``"auto"`` takes bfloat16 where the device has instructions for it; without
            them it can take more than ten times as long as float32.
        device: A torch device, for example ``"cpu"`` or ``"cuda"``.
    """
    if chosen != "auto":
        return chosen == "bfloat16"
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found: Mapping[str, bool] = torch.cpu.get_capabilities() if kind == "cpu" else {}
    return any(found.get(name, False) for name in _IN_BFLOAT16)


def all_cores() -> int:
    """Return how many cores this process may use."""
    return len(_cores()) or os.cpu_count() or 1


def free_cores(seconds: float = 0.2) -> int:
    """Return how many of the cores that this process may use are idle, at least 1."""
    import psutil

    busy, allowed = psutil.cpu_percent(seconds, percpu=True), _cores()
    of_mine = [share for core, share in enumerate(busy) if core in allowed] or busy
    return max(1, len(of_mine) - round(float(sum(of_mine)) / 100))


def _cores() -> set[int]:
    """Return the numbers of the cores that this process may use; none where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _allocator() -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return glibc's mallopt and malloc_trim; None for each that this system's C library lacks."""
    if sys.platform != "linux":
        return None, None
    library = ctypes.CDLL(None)
    return getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
