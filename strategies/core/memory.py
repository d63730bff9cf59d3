"""Keep memory between the steps of training, where the C library gives it back.

glibc maps every block above 32 MiB anew and unmaps it when it is freed. A step of CNN5 on 128 images frees and asks
for a gigabyte of such blocks, and the kernel clears every page of them again: a quarter of the step, in local training
as on the server.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Names and numbers of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4

_NEVER = 2**31 - 1
# What glibc gets to by itself, once blocks of these sizes were freed; its start is lower, and cannot be had back.
_USUAL = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process for a block of code, and give it back after; on Linux with glibc, else nothing.

    No result changes by it. It holds for the whole process, and blocks of this kind must not overlap. In another thread
    than the main one, blocks from 64 MiB on are kept only in a process that was started with ``MALLOC_ARENA_MAX=1``.
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


def _allocator() -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return glibc's two functions; None for each that this system's C library lacks."""
    if sys.platform != "linux":
        return None, None
    library = ctypes.CDLL(None)
    return getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
