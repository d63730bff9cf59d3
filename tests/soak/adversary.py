"""Runs beside a hostile node with a valid key, which draws its attacks, until the time is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile import ATTACKS
from intruded import HOSTILE, attack_by, intruded, join, run

MIB = 2**20


def attacked(folder: Path, seed: int, minutes: float, say: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Run beside the hostile node again and again.

    Each run must have the bits of the run without it, name it, and take less than twice the memory.

    Args:
        folder: For keys, logs and run folders.
        seed: Of the attacks.
        minutes: No new run begins after this time; one is always done.
        say: Receives a line for each run.

    Returns:
        The attacks, and a line for each broken promise.
    """
    rng, struck, broken = random.Random(f"{seed} adversary"), list[str](), list[str]()
    folder.mkdir()
    with intruded(folder) as here:
        expected, most = run(here, "alone")
        join(here, HOSTILE)
        until = time.monotonic() + 60.0 * minutes
        left = rng.sample(ATTACKS, len(ATTACKS))
        while not struck or time.monotonic() < until:
            left = left or rng.sample(ATTACKS, len(ATTACKS))
            struck.append(left.pop())
            attack_by(here, struck[-1])
            found, peak = run(here, f"attacked-{len(struck)}")
            wrong = check(found, expected) + ["twice the memory"] * (peak > 2 * most)
            say(f"{HOSTILE}: {struck[-1]}: {peak / MIB:.0f} of {most / MIB:.0f} MiB, {', '.join(wrong) or 'same bits'}")
            broken += [f"{struck[-1]}: {what}" for what in wrong]
    return struck, broken


def check(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the promises that a run beside the hostile node has broken."""
    wrong = [key for key in ("uploads", "table", "weights") if found[key] != expected[key]]
    named = {client for client, _ in found["refusals"]} == {HOSTILE}
    return [f"other {key}" for key in wrong] + ["another client is named"] * (not named)
