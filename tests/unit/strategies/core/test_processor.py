from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.core import processor
from strategies.core.processor import flush_subnormals, without_collections

ROOT = Path(__file__).resolve().parents[4]
SMALLEST_NORMAL = 1.1754943508222875e-38

# In a process of its own: what other tests left in the heap would serve the large blocks too.
FAULTS = textwrap.dedent("""
    import resource, torch
    from strategies.core.processor import keep_freed_memory

    def step():  # blocks of 40 to 64 MiB, above what glibc ever keeps by itself
        first = torch.empty(12 * 2**20).fill_(1.0)
        second = torch.empty(16 * 2**20).fill_(1.0)
        del first
        third = torch.empty(10 * 2**20).fill_(1.0)

    def faults():
        for _ in range(8):  # the heap grows to what a step needs
            step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with keep_freed_memory():
        kept = faults()
    print(kept, faults())
""")


@pytest.mark.slow
@pytest.mark.skipif(processor._allocator()[0] is None, reason="the C library is not glibc")
def test_memory_when_kept_is_not_mapped_anew_and_after_the_block_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    kept, after = map(int, done.stdout.split())

    assert kept < 100
    assert after > 20 * max(kept, 1)


def largest(value: float) -> float:
    return float((torch.full((8,), value) / 2).max())


def test_a_block_takes_subnormal_numbers_for_zero_and_leaves_normal_ones() -> None:
    with flush_subnormals():
        assert largest(SMALLEST_NORMAL) == 0.0
        assert largest(2 * SMALLEST_NORMAL) == SMALLEST_NORMAL


BLOCKS: dict[str, tuple[Any, Callable[[bool], object], Callable[[], bool]]] = {  # how each is set by hand, and seen
    "subnormal numbers": (flush_subnormals, torch.set_flush_denormal, lambda: largest(SMALLEST_NORMAL) == 0.0),
    "collections": (without_collections, lambda on: (gc.disable if on else gc.enable)(), lambda: not gc.isenabled()),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("before", [False, True])
def test_a_block_restores_what_was_set_before_it_also_after_an_error(name: str, before: bool) -> None:
    block, set_to, is_set = BLOCKS[name]
    set_to(before)
    try:
        with block():
            with pytest.raises(KeyError), block():
                raise KeyError
            assert is_set()
        assert is_set() is before
    finally:
        set_to(False)


@pytest.mark.slow
def test_all_threads_of_a_process_that_begins_with_it_take_subnormal_numbers_for_zero() -> None:
    code = textwrap.dedent("""
        import torch
        from strategies.core.processor import flush_subnormals, without_collections

        with flush_subnormals():
            torch.set_num_threads(2)
            many = torch.full((2**20,), 1e-39)
            inside = int((many * 0.5).count_nonzero())
        print(torch.get_num_threads(), inside)
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0"]
