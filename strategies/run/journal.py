"""The driver's record of a server stage: log lines, metrics, checkpoints."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..method import Part, Snapshot
    from .round_folder import RoundFolder


# The time that a stage still needs, reckoned from the times of its reports.


@dataclass
class Pace:
    """Reckons the seconds left of a stage of equal or steadily growing epochs.

    What comes before the first step of the first epoch, such as loading models, is not counted as work.

    Attributes:
        first: Epochs that an earlier process had finished.
    """

    first: int
    began: float
    _step: int = field(init=False)
    _total: int = 0
    _done: tuple[int, int] = (0, 0)
    _now: float = 0.0  # of the last report
    _anchor: tuple[float, float, bool] | None = (
        None  # time, epochs done by then, and whether they were counted in steps
    )
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
        """Return the seconds left; None while they are unknown."""
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
    seconds, steps = zip(*spans, strict=True)
    slope, least = linear_regression(steps, seconds)
    if slope <= 0.0:
        return fmean(seconds), 0.0
    return (least, slope) if least >= 0.0 else (0.0, linear_regression(steps, seconds, proportional=True).slope)


LOG_EVERY_S = 5.0
BAR_EVERY_S = 0.25
TICK_EVERY_S = 0.5


class ProgressFile:
    """Where a stage, in whatever process, writes how far it is, for the bar of a terminal; absent between stages.

    ``oneshot`` names it to the processes that it starts by the environment variable :data:`VARIABLE`.
    """

    VARIABLE = "ONESHOT_PROGRESS"

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def named(cls) -> ProgressFile | None:
        """Return the file that the environment names; None where no terminal shows a bar."""
        path = os.environ.get(cls.VARIABLE)
        return cls(Path(path)) if path else None

    def write(self, share: float, text: str) -> None:
        """Replace the content: the share of the stage that is done, from 0 to 1, and the state in words."""
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):  # the terminal's process has ended, or its disk is full
            new.write_text(json.dumps([share, text]), encoding="utf-8")
            new.replace(self._path)

    def read(self) -> tuple[float, str] | None:
        """Return what was written last; None if no stage is under way."""
        try:
            share, text = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return share, text

    def clear(self) -> None:
        """Remove it: no stage is under way."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Report:
    """The last report of a method."""

    step: int
    total: int
    values: dict[str, float]
    part: Part


class Journal:
    """The driver's :class:`strategies.method.Progress`; used around the server stage as a context manager.

    The thread that runs the stage makes every call; a thread of its own only logs during silence.

    Args:
        folder: The folder of metrics and checkpoints; None to keep none.
        interval_s: Seconds between two checkpoints, at least.
        heartbeat_s: Seconds of silence after which the last state is logged again.
        tick: Called now and then during the stage, for the driver's other duties.

    Attributes:
        resumed_at: Epochs that an earlier process had finished; 0 for a fresh stage.
    """

    def __init__(
        self,
        folder: RoundFolder | None,
        log: Callable[[str], None],
        *,
        label: str,
        unit: str = "epoch",
        interval_s: float = 20.0,
        heartbeat_s: float = 9.0,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self.resumed_at = 0
        self._folder = folder
        self._log = log
        self._label = label
        self._unit = unit
        self.interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._tick = tick
        self._bar = ProgressFile.named()
        self._began = self._saved = self._logged = monotonic()
        self._ticked = float("-inf")
        self._last: _Report | None = None
        self._pace = Pace(0, self._began)
        self._said: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Journal:
        self._end.clear()
        self._heart = threading.Thread(target=self._beat, name="journal-heartbeat", daemon=True)
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._heart is not None:
            self._heart.join()
            self._heart = None
        if self._bar is not None:
            self._bar.clear()

    def resume(self) -> Snapshot | None:
        """Return the folder's checkpoint, or None; metrics of later epochs are dropped, because these epochs repeat.

        Raises:
            StoreError: The checkpoint is damaged.
        """
        snapshot = self._folder.load_checkpoint() if self._folder else None
        self.resumed_at = snapshot.step if snapshot else 0
        if self._folder:
            # A stage that starts anew records its epochs anew, epoch 0 included.
            self._folder.truncate_metrics(snapshot.step if snapshot else -1)
        with self._lock:
            self._began = self._saved = monotonic()
            self._last = self._said = None
            self._pace = Pace(self.resumed_at, self._began)
            if snapshot:
                self._say(f"{self._label}: resumed after {self._unit} {snapshot.step}")
        return snapshot

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, part: Part = (0, 0)) -> None:
        """Record that ``step`` of ``total`` epochs are done; the first, the last and one every 5 s are logged.

        With a terminal's bar the last alone is logged, and the bar shows the others.
        """
        with self._lock:
            now = monotonic()
            # Between two epoch borders the values of the last one are still the newest.
            known = self._last.values if self._last else {}
            self._last = _Report(step, total, dict(values or known), part)
            self._pace.note(now, step, total, part)
            last = step >= total and self._said != (step, total)
            every = LOG_EVERY_S if self._bar is None else BAR_EVERY_S
            if self._said is None or last or now - self._logged >= every:
                self._show(now, last=last)
                self._said = (step, total)
        self.tick()

    def record(self, row: Mapping[str, Any]) -> None:
        """Add a row to the metrics; its optional ``"note"`` is a line for the user.

        Raises:
            StoreError: The disk refuses.
        """
        if "note" in row:
            with self._lock:
                self._say(f"{self._label}: {row['note']}")
        if self._folder:
            self._folder.record(row)

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Take and save a checkpoint if the last one is old enough.

        Raises:
            StoreError: The disk refuses.
        """
        if self._folder and monotonic() - self._saved >= self.interval_s:
            self.save(take())

    def save(self, snapshot: Snapshot) -> None:
        """Save a checkpoint of another process.

        Raises:
            StoreError: The disk refuses.
        """
        if self._folder:
            self._folder.save_checkpoint(snapshot)
        # Counted from the end of the writing, so that a slow disk cannot take up the whole stage.
        self._saved = monotonic()

    def tick(self) -> None:
        """Let the driver do its other work, at most every 0.5 s."""
        if self._tick and monotonic() - self._ticked >= TICK_EVERY_S:
            self._tick()
            self._ticked = monotonic()

    def _beat(self) -> None:
        while True:
            with self._lock:
                silent = monotonic() - self._logged
                if silent >= self._heartbeat_s:
                    self._show(monotonic())
                    silent = 0.0
            if self._end.wait(self._heartbeat_s - silent):
                return

    def _show(self, now: float, *, last: bool = False) -> None:
        if self._bar is None or last:
            self._say(self._line(now))
            if self._bar is not None:
                self._bar.clear()
            return
        self._logged, report = now, self._last
        done, of = report.part if report is not None else (0, 0)
        share = (report.step + (done / of if of else 0.0)) / max(1, report.total) if report is not None else 0.0
        self._bar.write(share, self._line(now))

    def _say(self, line: str) -> None:
        self._logged = monotonic()
        self._log(line)

    def _line(self, now: float) -> str:
        elapsed = now - self._began
        if self._last is None:
            return f"{self._label}: starting, {duration(elapsed)} elapsed"
        last = self._last
        parts = [f"{self._unit} {last.step} of {last.total}"]
        if done := last.part[0]:
            parts.append(f"step {done} of {last.part[1]}" if last.part[1] else f"step {done}")
        parts += [f"{name} {value:.3g}" for name, value in last.values.items()]
        parts.append(f"{duration(elapsed)} elapsed")
        if last.step < last.total and (left := self._pace.left(now)) is not None:
            parts.append(f"about {duration(left)} left")
        return f"{self._label}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Return a duration in words: ``8 s``, ``2 min 5 s``, ``1 h 3 min``.

    Args:
        seconds: Not negative.
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
