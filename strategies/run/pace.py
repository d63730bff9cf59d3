"""The time that a stage still needs, reckoned from the times of its reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass
class Pace:
    """Reckons the seconds left of a stage of equal or steadily growing epochs.

    What comes before the first step of the first epoch, such as loading models, is not counted as work.

    Attributes:
        first: Epochs that an earlier process had finished.
        began: When this process began.
    """

    first: int
    began: float
    _step: int = field(init=False)
    _total: int = 0
    _done: tuple[int, int] = (0, 0)
    _now: float = 0.0  # of the last report
    _anchor: tuple[float, float, bool] | None = None  # time, epochs done by then, and whether steps told it
    _borders: list[tuple[float, int, int]] = field(default_factory=list)  # time, epochs done, steps of the last one

    def __post_init__(self) -> None:
        self._step = self.first

    def note(self, now: float, step: int, total: int, part: tuple[int, int] = (0, 0)) -> None:
        """Take a report; the arguments are those of :meth:`strategies.method.Progress.report`."""
        done, of = part
        if step == self.first and (self._anchor is None or (done and not self._anchor[2])):
            self._anchor = now, step + (done / of if of else 0.0), bool(done)
        if step > self._step or (step > self.first and not self._borders):
            self._borders.append((now, step, of if not done else 0))
        self._step, self._total, self._done, self._now = step, total, part, now

    def left(self, now: float) -> float | None:
        """Return the seconds left; None while nothing tells them."""
        if not self._borders:
            return self._left_in_first_epoch(now)
        if not (spans := self._spans()):
            return None
        counts = [count for _, count in spans]
        growing = len(set(counts)) > 1 and all(counts)
        expected = _line(spans) if growing else (fmean(span for span, _ in spans), 0.0)
        growth = counts[-1] - counts[-2] if growing else 0
        rest = [
            expected[0] + expected[1] * (counts[-1] + growth * ahead)
            for ahead in range(1, self._total - self._step + 1)
        ]
        # An epoch that takes longer than expected does not make the later ones shorter.
        return sum(rest[1:]) + max(0.0, rest[0] - (now - self._borders[-1][0])) if rest else 0.0

    def _left_in_first_epoch(self, now: float) -> float | None:
        done, of = self._done
        if self._anchor is None or not of or (share := self._step + done / of - self._anchor[1]) <= 0:
            return None
        pace = (self._now - self._anchor[0]) / share
        return max(0.0, pace * (self._total - self._step - done / of) - (now - self._now))

    def _spans(self) -> list[tuple[float, int]]:
        """Return the mean seconds of an epoch between each two borders, and its number of steps, 0 if unknown."""
        time, step = (self.began, float(self.first)) if self._anchor is None else self._anchor[:2]
        found = []
        for border, number, count in self._borders:
            # A first report at the end of an epoch's only step leaves no part of that epoch to measure.
            if number > step:
                found.append(((border - time) / (number - step), count))
            time, step = border, float(number)
        # Without a report before it, the first span holds the start of the stage too.
        return found[1:] if self._anchor is None and len(found) > 1 else found


def _line(spans: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return a, b >= 0 of the least squares ``seconds = a + b steps``."""
    seconds, steps = fmean(span for span, _ in spans), fmean(count for _, count in spans)
    spread = sum((count - steps) ** 2 for _, count in spans)
    slope = sum((count - steps) * (span - seconds) for span, count in spans) / spread
    if slope <= 0.0:
        return seconds, 0.0
    if seconds - slope * steps < 0.0:
        return 0.0, sum(span * count for span, count in spans) / sum(count * count for _, count in spans)
    return seconds - slope * steps, slope
