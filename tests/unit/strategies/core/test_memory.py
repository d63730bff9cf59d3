from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from strategies.core import memory
from strategies.core.memory import kept_memory

ROOT = Path(__file__).resolve().parents[4]

# In a process of its own: what other tests left in the heap would serve the large blocks too.
FAULTS = textwrap.dedent("""
    import resource, torch
    from strategies.core.memory import kept_memory

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

    with kept_memory():
        kept = faults()
    print(kept, faults())
""")


@pytest.mark.slow
@pytest.mark.skipif(memory._allocator()[0] is None, reason="the C library is not glibc")
def test_memory_when_kept_is_not_mapped_anew_and_after_the_block_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    kept, after = map(int, done.stdout.split())

    assert kept < 100
    assert after > 20 * max(kept, 1)


def test_a_system_without_the_allocator_s_functions_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", None)  # would fail if it were asked

    with kept_memory():
        assert torch.ones(3).sum() == 3


def test_the_block_s_error_comes_through() -> None:
    with pytest.raises(ValueError, match="of the block"), kept_memory():
        raise ValueError("of the block")
