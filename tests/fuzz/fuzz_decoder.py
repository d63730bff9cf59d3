"""What a decoder promises: an input is accepted, or refused with one line of one of its errors; nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

from hypothesis import strategies as st

from strategies.core.errors import OneShotError

LONGEST_LINE = 4000
# Processor seconds for one input; a good one takes milliseconds.
MOST_S = 5.0


@dataclass
class Tally:
    """What became of the inputs of one decoder."""

    tried: int = 0
    accepted: int = 0
    refused: int = 0
    crashed: int = 0
    slowest_s: float = 0.0
    reasons: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Decoder:
    """Something that reads what comes from outside.

    Attributes:
        inputs: Malformed inputs.
        read: Reads one, in a folder of its own or without.
        refusals: Its errors.
        look: Uses an accepted value; raises AssertionError if it cannot be used.
    """

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], Any]
    refusals: tuple[type[BaseException], ...] = (OneShotError,)
    look: Callable[[Any], None] = lambda found: None

    def judge(self, given: Any, tally: Tally) -> None:
        """Read one input and count what became of it."""
        tally.tried += 1
        tally.crashed += 1  # until it is shown to be well
        began = thread_time()
        try:
            found = self.read(given)
        except self.refusals as error:
            line = str(error)
            assert line.strip(), "a refusal without a reason"
            assert "\n" not in line, f"a refusal of several lines: {line[:300]!r}"
            assert len(line) <= LONGEST_LINE, f"a refusal of {len(line)} letters: {line[:300]!r}"
            tally.refused += 1
            tally.reasons.add(type(error).__name__)
        else:
            self.look(found)
            tally.accepted += 1
        took = thread_time() - began
        tally.slowest_s = max(tally.slowest_s, took)
        assert took < MOST_S, f"it took {took:.1f} s"
        tally.crashed -= 1
