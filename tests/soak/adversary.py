"""Runs beside a hostile node with a valid key, which draws its attacks, until the time is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hostile import ATTACKS, IN_ROUNDS, ROUND_ATTACKS
from intruded import HOSTILE, attack_by, intruded, join, run
from intruded import IN_ROUNDS as ROUNDS

MIB = 2**20


def attacked(folder: Path, seed: int, minutes: float, say: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Run beside a hostile node again and again: it lies in its upload, or uploads honestly and lies in FENS's rounds.

    Each run must have the bits of the run without it, name it, and take less than twice the memory. A run in rounds has
    its honest upload, and is compared with the first such run.

    Returns:
        The attacks, and a line for each broken promise.
    """
    rng, struck, broken = random.Random(f"{seed} adversary"), list[str](), list[str]()
    folder.mkdir()
    with intruded(folder) as here:
        expected = {False: run(here, "alone")}
        join(here, HOSTILE)
        until = time.monotonic() + 60.0 * minutes
        left = drawn(rng)
        while len(struck) < 2 or time.monotonic() < until:
            left = left or drawn(rng)
            struck.append(left.pop())
            attack_by(here, struck[-1])
            later = struck[-1].startswith(IN_ROUNDS)
            found, peak = run(here, f"attacked-{len(struck)}", *[ROUNDS] * later)
            facts, most = expected.setdefault(later, (found, peak))
            wrong = check(found, facts) + ["twice the memory"] * (peak > 2 * most)
            say(f"{HOSTILE}: {struck[-1]}: {peak / MIB:.0f} of {most / MIB:.0f} MiB, {', '.join(wrong) or 'same bits'}")
            broken += [f"{struck[-1]}: {what}" for what in wrong]
    return struck, broken


def drawn(rng: random.Random) -> list[str]:
    """Return all attacks in a random order, the last first, those on uploads and those in rounds in turn."""
    first, second = (rng.sample(attacks, len(attacks)) for attacks in (ATTACKS, ROUND_ATTACKS))
    return [attack for pair in zip_longest(first, second) for attack in pair if attack is not None][::-1]


def check(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the promises that a run beside the hostile node has broken."""
    wrong = [key for key in ("uploads", "table", "weights", "rounds") if found[key] != expected[key]]
    named = {client for client, _ in found["refusals"]} == {HOSTILE}
    return [f"other {key}" for key in wrong] + ["another client is named"] * (not named)
