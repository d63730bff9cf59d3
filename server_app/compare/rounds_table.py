"""The table of runs in rounds: the rounds and MiB until a score is reached, means and spreads over the seeds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from server_app.compare.runs_in_rounds import RoundsRun
from server_app.launch.console import TableFormat
from server_app.report.tables import Table, places_of, titled, write_out
from strategies.scores.values import LOWER_IS_BETTER

STEP, STEP_OF_LOSS = 5.0, 0.1  # between two default targets, in % and in nats
DEFAULT_TARGETS = 2  # as in the tables of FLBoost


@dataclass(frozen=True)
class Reached:
    """The cost at which the runs of a setting reach a score.

    Attributes:
        rounds: The first tested round with it, of every run that reached it.
        mib: MiB per client, sent and received until that round, of the same runs.
        missed: Rounds and MiB of every run that never reached it.
    """

    target: float
    rounds: tuple[int, ...]
    mib: tuple[float, ...]
    missed: tuple[tuple[int, float], ...]

    def shown(self) -> tuple[str, str]:
        """Return rounds and MiB as text: ``92.7 ± 14.3``, or ``>50 (1 of 3)`` if some run never reached it."""
        if not self.missed:
            return _mean_text(self.rounds, 0 if len(self.rounds) == 1 else 1), _amount(_mean(self.mib))
        of = f" ({len(self.rounds)} of {len(self.rounds) + len(self.missed)})"
        return f">{min(done for done, _ in self.missed)}{of}", f">{_amount(min(mib for _, mib in self.missed))}"

    def as_json(self) -> dict[str, Any]:
        """Return the same numbers as JSON; means are None if some run never reached the score."""
        return {
            "rounds": None if self.missed else round(_mean(self.rounds), 2),
            "rounds_spread": None if self.missed else _spread(self.rounds),
            "reached": len(self.rounds),
            "more_than": min((done for done, _ in self.missed), default=None),
            "mib_per_client": None if self.missed else round(_mean(self.mib), 6),
        }


@dataclass(frozen=True)
class RoundsLine:
    """One line of the table: a setting."""

    name: str
    runs: tuple[RoundsRun, ...]
    reached: tuple[Reached, ...]

    def mean(self, what: str) -> float | None:
        """Return the mean of one number over the runs; None unless all runs have it."""
        found = [getattr(run, what) for run in self.runs]
        return None if None in found else round(_mean(found), 3)

    @property
    def metric(self) -> str:
        """The score."""
        return self.runs[0].metric

    @property
    def last_text(self) -> str:
        """The mean score after the last round with its sample deviation, without the unit."""
        return _mean_text([run.last for run in self.runs], places_of(self.metric))

    def curve(self) -> list[tuple[int, float, float | None]]:
        """Return round, mean score and sample deviation, for the rounds in which every run was tested."""
        tested = {k: {test.number: test.score for test in run.tested} for k, run in enumerate(self.runs)}
        scores = pd.DataFrame(tested).dropna().sort_index()  # a row per round, a column per run
        means, spreads = scores.mean(axis="columns"), scores.std(axis="columns")
        several = len(self.runs) > 1
        rounds = zip(scores.index, means, spreads, strict=True)
        return [(int(n), float(mean), float(spread) if several else None) for n, mean, spread in rounds]

    def as_json(self) -> dict[str, Any]:
        """Return the line for rounds.json."""
        found = {f"{each.target:g}": each.as_json() for each in self.reached}
        return {**self._facts(), "targets": found}

    def flat(self) -> dict[str, Any]:
        """Return the line for the CSV, with a column per target and number."""
        own = [(f"{key}_to_{each.target:g}", value) for each in self.reached for key, value in each.as_json().items()]
        return {**self._facts(), **dict(own)}

    def _facts(self) -> dict[str, Any]:
        last, best = [run.last for run in self.runs], [run.best for run in self.runs]
        name, digits = self.metric.replace("-", "_"), places_of(self.metric)
        return {
            "name": self.name,
            "results": len(self.runs),
            "rounds": min(run.done for run in self.runs),
            name: round(_mean(last), digits),
            f"{name}_spread": _spread(last, digits),
            f"best_{name}": round(_mean(best), digits),
            "best_spread": _spread(best, digits),
            "refinement_s": self.mean("refinement_s"),
            "arithmetic_s": self.mean("arithmetic_s"),
            "server_s": self.mean("server_s"),
        }

    def shown(self) -> list[str]:
        """Return the line for the printed table, one text per column."""
        seconds = (self.mean("refinement_s"), self.mean("server_s"))
        return [
            self.name,
            str(len(self.runs)),
            *(text for each in self.reached for text in each.shown()),
            self.last_text,
            f"{_mean(run.best for run in self.runs):.{places_of(self.metric)}f}",
            *("-" if value is None else f"{value:.3g}" for value in seconds),
        ]


def line_of(name: str, runs: tuple[RoundsRun, ...], targets: Sequence[float]) -> RoundsLine:
    """Return the line of a setting."""
    return RoundsLine(name, runs, tuple(_reached(runs, target) for target in targets))


def _reached(runs: Sequence[RoundsRun], target: float) -> Reached:
    firsts = [(run, run.first_at(target)) for run in runs]
    found = [first for _, first in firsts if first is not None]
    missed = tuple((run.tested[-1].number, run.tested[-1].mib) for run, first in firsts if first is None)
    return Reached(target, tuple(test.number for test in found), tuple(test.mib for test in found), missed)


def default_targets(settings: Sequence[tuple[str, Sequence[RoundsRun]]]) -> tuple[float, ...]:
    """Return the two best multiples of 5 %, of a log loss .1, that every run of some setting reaches; fewer near 0."""
    lower = settings[0][1][0].metric in LOWER_IS_BETTER
    sign, step = (-1, STEP_OF_LOSS) if lower else (1, STEP)
    best = max(min(sign * run.best for run in runs) for _, runs in settings)
    found = [sign * step * (best // step - place) for place in range(DEFAULT_TARGETS)]
    return tuple(sorted(round(target, 6) for target in found if target > 0))


def table_of(facts: Mapping[str, Any], lines: Sequence[RoundsLine]) -> Table:
    """Return the table of a report."""
    data, targets = facts["data"], facts["targets"]
    words, _, unit = titled(lines[0].metric).partition(", ")
    each = [name for target in targets for name in (f"to {target:g} {unit}".rstrip(), "MiB")]
    ends = [f"{end}, {unit}" if unit else end for end in ("last", "best")]
    columns = ["setting", "n", *each, *ends, "refine, s", "server, s"]
    runs = [run for line in lines for run in line.runs]
    counts = ", ".join(f"{n} {what}{'s' * (n > 1)}" for n, what in ((len(lines), "setting"), (len(runs), "run")))
    every = sorted({str(value) for run in runs if (value := run.shared.get("iterative.evaluate-every", 1)) != 1})
    unfinished = [f"{run.path.name}, {run.done} of {run.planned} rounds" for run in runs if run.done < run.planned]
    some = f"a{'n' * words.startswith(('a', 'A'))} {words}"
    heading = f"Rounds to {some} on held-out examples{f' ({data})' if data else ''}: {counts}."
    notes = [
        f"Mean ± sample standard deviation of n seeds. To {some}: the first tested round that reaches it, and the "
        "MiB that a client sent and received until then. >R (k of n): k of n runs reached it, another had not after R "
        "rounds.",
        "Last: after the last tested round. Best: chosen on the held-out examples themselves.",
        "Refine: wall seconds per round of the method that fine-tunes the model. Server: all rounds, refinement "
        "included.",
        *([f"Tested every {'/'.join(every)} rounds only."] if every else []),
        *([f"Unfinished: {'; '.join(unfinished)}."] if unfinished else []),
    ]
    return Table(heading, columns, [line.shown() for line in lines], notes=notes)


def print_rounds(facts: Mapping[str, Any], lines: Sequence[RoundsLine], format: TableFormat) -> None:  # noqa: A002
    """Print a report; every format but text prints only the report on standard output."""
    write_out(lambda: table_of(facts, lines), format, facts=facts, rows=lambda: [line.flat() for line in lines])
    if format == "text" and facts["out"]:
        written = [what for what in ("page", "plot", "results") if facts[what]]
        sys.stdout.write("".join(f"{what:<14} {facts['out']}/{facts[what]}\n" for what in written))


def _spread(values: Sequence[float], digits: int | None = 2) -> float | None:
    """Return the sample standard deviation (n - 1); None of a single value."""
    if len(values) < 2:
        return None
    found = float(pd.Series(values, dtype=float).std())
    return found if digits is None else round(found, digits)


def _mean(values: Iterable[float]) -> float:
    # To nine digits: a tie at the last one that is shown is a tie, whatever the order of the sum.
    return round(float(pd.Series(list(values), dtype=float).mean()), 9)


def _mean_text(values: Sequence[float], digits: int) -> str:
    spread = _spread(values, None)
    return f"{_mean(values):.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _amount(mib: float) -> str:
    return f"{mib:.3g}" if mib < 1000 else f"{mib:.0f}"
