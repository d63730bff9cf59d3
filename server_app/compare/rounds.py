"""Runs in rounds: which settings they have, how soon each reaches a score, and their curves."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from server_app.compare.sources import data_of
from server_app.launch.console import TableFormat
from server_app.report.communication import tested_rounds
from server_app.report.drawing import new_figure, save_all
from server_app.report.page import PAGE_FILE, Page, known_facts, plots_of, report_folder, software_facts, write_page
from server_app.report.tables import Table, places_of, setting_line, titled, unit_of, worded, write_out
from server_app.settings.checks import free_on
from server_app.settings.choices import CHOICES, options_of
from server_app.settings.read import listed_settings
from strategies.core.durable import make_folder, store_errors
from strategies.core.errors import OptionError
from strategies.core.options import RESUME, Scalar
from strategies.flower.rounds.config import OWN_LR, IterativeConfig
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder, info_of
from strategies.run.stage import last_round
from strategies.scores.values import LOWER_IS_BETTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Options that may differ between the runs of one setting: the seed, and options that do not change the computation.
NEUTRAL = free_on(RESUME) | {"seed", "uploads", "device", "threads", "iterative.checkpoint-every"}
# Options that all strategies of 'iterative' share; its other options belong to one strategy or a few.
SHARED = ("rounds", "fraction", "lr-decay", "evaluate-every")
OF_STRATEGIES: Mapping[str, Sequence[str]] = {
    "server-lr": tuple(OWN_LR),
    "mu": ("fedprox",),
    "dyn-alpha": ("feddyn",),
    "stc-density": ("stc",),
    "stc-values": ("stc",),
}

Flat = Mapping[str, Scalar]


@dataclass(frozen=True)
class Tested:
    """A tested round: its number from 1, the score in % or nats, and the MiB per client sent and received so far."""

    number: int
    score: float
    mib: float


@dataclass(frozen=True)
class RoundsRun:
    """A run in rounds, finished or not.

    Attributes:
        shared: Its settings that are not specific to the method.
        own: Its other settings, those of its strategy and its refiner.
        tested: At least one round.
        refinement_s: Mean wall seconds of a round's refinement; None without refinement.
        arithmetic_s: The method's own part of them, without copies and waiting.
        server_s: Wall seconds of the server in all rounds; None for an unfinished or resumed run, because they are
            measured in one process.
        metric: The score.
    """

    path: Path
    seed: int
    method: str
    shared: Flat
    own: Flat
    tested: tuple[Tested, ...]
    done: int
    planned: int
    refinement_s: float | None
    arithmetic_s: float | None
    server_s: float | None
    metric: str

    @property
    def last(self) -> float:
        """The score after the last tested round."""
        return self.tested[-1].score

    @property
    def best(self) -> float:
        """The best score of all tested rounds."""
        return (min if self.metric in LOWER_IS_BETTER else max)(test.score for test in self.tested)

    def first_at(self, target: float) -> Tested | None:
        """Return the first tested round that reaches a score; None if none does."""
        lower = self.metric in LOWER_IS_BETTER
        return next((each for each in self.tested if each.score == target or (each.score < target) == lower), None)


def read_runs(paths: Sequence[Path]) -> tuple[str | None, list[RoundsRun]]:
    """Return the data set of some runs (None: another project's), and the runs.

    Their scores are the headline score that all of them have recorded, else the accuracy.

    Raises:
        OptionError: A run is not in rounds, a run is named twice, or the data sets differ.
        StoreError: A folder is no run folder, or is damaged.
    """
    data, metrics = data_of(paths), {_recorded(path) for path in paths}
    metric = metrics.pop() if len(metrics) == 1 else "accuracy"
    return data, [_read(path, metric) for path in paths]


def _recorded(path: Path) -> str:
    """Return the headline score of a run's rounds; the accuracy for one of an earlier version, which has no other."""
    with RunFolder.open(path, write=False) as folder:
        metric = str((folder.info.get("settings") or {}).get("metric", "accuracy"))
        return metric if tested_rounds(last_round(folder).metrics(), metric) else "accuracy"


def _read(path: Path, metric: str) -> RoundsRun:
    with RunFolder.open(path, write=False) as folder:
        info, result, metrics = folder.info, folder.result() or {}, last_round(folder).metrics()
    rows = [row for row in metrics if "mib_per_client" in row]
    tested = [Tested(row["epoch"], row[metric], row["mib_per_client"]) for row in tested_rounds(rows, metric)]
    if not tested:
        raise OptionError(
            f"{path} has no accuracy of a round with its clients: must be a run with at least one tested round, of "
            "method 'iterative' or another that trains its clients in rounds"
        )
    name, stored = info["method"], info.get("settings")
    flat = listed_settings(stored) if isinstance(stored, dict) else {}
    method, shared, own = _split(name, flat) if flat else (CHOICES[name].title, {}, _plain_facts(info))
    done = int(rows[-1]["epoch"])
    whole = result.get("status") == "finished" and not result.get("resumed_at")
    return RoundsRun(
        path.absolute(),
        info["seed"],
        method,
        {**shared, "clients": info.get("num-supernodes") or 0},
        own,
        tuple(tested),
        done,
        int(flat.get(f"{name}.rounds", own.get("rounds", done))),
        _mean_of(rows, "refinement_s"),
        _mean_of(rows, "arithmetic_s"),
        result["seconds"].get("server") if whole else None,
        metric,
    )


def _plain_facts(info: Mapping[str, Any]) -> Flat:
    """Return the stored facts on strategy and refiner of another project's run, which lacks the app's settings."""
    tables = ("base", *CHOICES)
    facts = {**info.get("config", {}), **{key: info[key] for key in info if key.partition(".")[0] in tables}}
    return {k: v for k, v in facts.items() if isinstance(v, Scalar) and k != "checkpoint-every"}


def _mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [float(row[key]) for row in rows if key in row]
    return fmean(found) if found else None


def _split(name: str, flat: Flat) -> tuple[str, Flat, Flat]:
    """Return the title of a run's method, the settings that it shares with other methods, and its own settings."""
    compared = {key: value for key, value in flat.items() if key not in NEUTRAL and key != "method"}
    options = options_of(CHOICES)
    shared = {key: value for key, value in compared.items() if key not in options}
    own = {key: value for key, value in compared.items() if key in CHOICES[name].keys}
    if name != "iterative":
        return CHOICES[name].title, shared, own
    strategy, refiner = str(own.pop("iterative.strategy")), str(own.pop("iterative.refiner"))
    shared |= {key: own.pop(key) for key in [f"iterative.{option}" for option in SHARED]}
    used = {key for key in own if strategy in OF_STRATEGIES.get(key.partition(".")[2], (strategy,))}
    refining = options_of([refiner] if refiner in CHOICES else [])
    own = {key: value for key, value in compared.items() if key in used | refining}
    return IterativeConfig(strategy=strategy, refiner=refiner).label, shared, own


def settings_of(runs: Sequence[RoundsRun]) -> list[tuple[str, tuple[RoundsRun, ...]]]:
    """Group runs that differ in the seed only: the name of each setting, and its runs sorted by seed.

    A setting's name lists the options that differ between runs. An option of one strategy or refiner is compared among
    its own runs only.

    Raises:
        OptionError: Two runs have the same settings and the same seed.
    """
    groups: dict[Any, list[RoundsRun]] = {}
    for run in runs:
        key = (run.method, frozenset(run.shared.items()), frozenset(run.own.items()))
        for other in groups.setdefault(key, []):
            if other.seed == run.seed:
                raise OptionError(
                    f"{other.path} and {run.path} have the same settings and the same seed, {run.seed}: must be one "
                    "run per setting and seed"
                )
        groups[key].append(run)
    return [(_name(group[0], runs), tuple(sorted(group, key=lambda run: run.seed))) for group in groups.values()]


def _name(run: RoundsRun, runs: Sequence[RoundsRun]) -> str:
    alike = [other.own for other in runs if other.method == run.method]
    differing = _differing(run.shared, [other.shared for other in runs]) + _differing(run.own, alike)
    return ", ".join([run.method, *differing])


def _differing(mine: Flat, others: Sequence[Flat]) -> list[str]:
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in mine.items()
        if any(other.get(key, value) != value for other in others)
    ]


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
    words, unit = worded(lines[0].metric), unit_of(lines[0].metric)
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


def rounds_setting(lines: Sequence[RoundsLine]) -> str:
    """Return the line below the titles of runs in rounds: data, split, clients and seeds."""
    runs = _runs(lines)
    return setting_line(
        [run.shared if "data.name" in run.shared else {} for run in runs],
        [int(run.shared.get("clients", 0)) for run in runs],
        [run.seed for run in runs],
    )


def rounds_page(facts: Mapping[str, Any], lines: Sequence[RoundsLine]) -> Page:
    """Return the page of runs in rounds."""
    table, runs = table_of(facts, lines), _runs(lines)
    name, unit = worded(lines[0].metric), unit_of(lines[0].metric)
    choose = min if lines[0].metric in LOWER_IS_BETTER else max
    best = choose(lines, key=lambda line: sum(run.last for run in line.runs) / len(line.runs))
    words = ["oneshot", "rounds", *(str(run.path) for run in runs)]
    targets = ",".join(f"{target:g}" for target in facts["targets"]) or "50"
    return Page(
        kind="Rounds",
        title=table.heading.partition(":")[0],
        setting=rounds_setting(lines),
        figures=[(f"{best.last_text} {unit}".rstrip(), f"after the last round, {best.name}"), (str(len(runs)), "runs"),
                 (str(max(run.done for run in runs)), "rounds at most")],
        facts=[*known_facts({"runs": ", ".join(str(run.path) for run in runs), "folder": facts["out"]}),
               *software_facts(info_of(runs[0].path))],
        warnings=[f"unfinished: {run.path.name}, {run.done} of {run.planned} rounds"
                  for run in runs if run.done < run.planned],
        tables=[replace(table, heading=f"How soon a score is reached: {name}", strong=frozenset({lines.index(best)}))],
        plots=plots_of(Path(facts["out"]), [facts["plot"]]),
        commands=[("Other targets", shlex.join([*words, "--targets", targets, "--out", facts["out"]])),
                  ("The table for a program", shlex.join([*words, "--format", "csv"]))],
    )  # fmt: skip


def _runs(lines: Sequence[RoundsLine]) -> list[RoundsRun]:
    return [run for line in lines for run in line.runs]


STYLES = ("-", "--", ":", "-.")
LEGEND_LETTERS = 38  # letters of a name per line
SINGLE = 30  # up to this number of tested rounds, each has a mark


def plot_rounds(lines: Sequence[RoundsLine], targets: Sequence[float]) -> Figure:
    """Draw the mean score of every setting over the rounds, in a band of one sample deviation.

    If a run of a setting is unfinished, a longer run of the setting continues as a thin line.

    Args:
        lines: At least one line.
        targets: Scores in % or nats, drawn as horizontal lines.
    """
    from matplotlib import colormaps

    figure, axes = new_figure(9.5, max(4.5, 1.0 + 0.3 * len(lines)))
    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    marker = "." if max(len(run.tested) for line in lines for run in line.runs) <= SINGLE else ""
    for place, line in enumerate(lines):
        look = {
            "color": palette[place % len(palette)], "linestyle": STYLES[place // len(palette) % len(STYLES)],
        }  # fmt: skip
        _draw(axes, line, look, marker)
    for target in targets:
        axes.axhline(target, color="#9aa5b1", linestyle=":", linewidth=1.0, zorder=0)
        text = f"{target:g} {unit_of(lines[0].metric)}".rstrip()
        axes.annotate(
            text, (1.0, target), xycoords=("axes fraction", "data"), xytext=(-2, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize="x-small", color="#5f6b76",
        )  # fmt: skip
    axes.locator_params(axis="x", integer=True)
    tested = [test.number for line in lines for run in line.runs for test in run.tested]
    axes.set_xlim(min(tested) if len(set(tested)) > 1 else 0, max(tested))
    axes.set_xlabel("round")
    axes.set_ylabel(titled(lines[0].metric, "held-out examples"))
    several = any(len(line.runs) > 1 for line in lines)
    axes.set_title("Round by round" + ": mean over the seeds, ± one sample deviation" * several)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    return figure


def _draw(axes: Axes, line: RoundsLine, look: Mapping[str, Any], marker: str) -> None:
    curve = line.curve()
    numbers, means = [number for number, _, _ in curve], [mean for _, mean, _ in curve]
    seeds = f" ({len(line.runs)} seeds)" * (len(line.runs) > 1)
    name = textwrap.fill(line.name + seeds, LEGEND_LETTERS, subsequent_indent="   ")
    axes.plot(numbers, means, **look, linewidth=1.6, marker=marker, label=name, clip_on=False)
    if len(line.runs) > 1:
        low = [mean - (spread or 0.0) for _, mean, spread in curve]
        high = [mean + (spread or 0.0) for _, mean, spread in curve]
        axes.fill_between(numbers, low, high, color=look["color"], alpha=0.15, linewidth=0)
    last = numbers[-1] if numbers else 0
    for run in line.runs:
        beyond = [test for test in run.tested if test.number >= last]
        if len(beyond) > 1:
            places = [test.number for test in beyond], [test.score for test in beyond]
            axes.plot(*places, **look, linewidth=0.8, alpha=0.6)


FACTS_FILE = "rounds.json"
PLOT = "learning_curves"


def report_rounds(
    runs: Sequence[Path],
    targets: Sequence[float] = (),
    out: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], list[RoundsLine]]:
    """Compare runs in rounds, which may be unfinished; return the content of rounds.json, and the lines of the table.

    Args:
        runs: Their folders, of one data set.
        targets: Scores in % or nats; empty: :func:`default_targets`.
        out: A folder for rounds.json, the plot of the learning curves and a page, new or of an earlier report; None
            to write nothing.

    Raises:
        OptionError: The runs cannot be compared.
        StoreError: A folder is no run folder, is damaged, or holds no report.
    """
    folder = report_folder(out, FACTS_FILE)
    data, found = read_runs(runs)
    settings = settings_of(found)
    wanted = tuple(sorted(set(targets))) or default_targets(settings)
    lines = [
        RoundsLine(name, members, tuple(_reached(members, target) for target in wanted)) for name, members in settings
    ]
    facts: dict[str, Any] = {
        "data": data,
        "metric": lines[0].metric,
        "targets": list(wanted),
        "table": [line.as_json() for line in lines],
        "runs": [_run_facts(line) for line in lines],
        "out": str(folder or ""),
        "plot": "",
        "results": FACTS_FILE if folder else "",
        "page": PAGE_FILE if folder else "",
    }
    if folder is not None:
        with store_errors(folder):
            make_folder(folder)
        drawn = save_all(folder, {PLOT: lambda: plot_rounds(lines, wanted)}, rounds_setting(lines), log)
        facts["plot"] = "".join(drawn)
        write_page(folder / PAGE_FILE, rounds_page(facts, lines))
        write_json(folder / FACTS_FILE, facts)
    return facts, lines


def _run_facts(line: RoundsLine) -> dict[str, Any]:
    """Return the runs of a line with their curves: rounds, scores in % or nats, MiB per client so far."""
    return {
        "name": line.name,
        "seeds": {
            str(run.seed): {
                "run": str(run.path),
                "rounds": run.done,
                "curve": [[test.number, test.score, test.mib] for test in run.tested],
            }
            for run in line.runs
        },
    }


def read_targets(text: str) -> tuple[float, ...]:
    """Read comma-separated scores in % or nats; an empty text has none.

    Raises:
        OptionError: One is not a number above 0 and at most 100.
    """
    try:
        found = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        found = (0.0,)
    if not all(0.0 < target <= 100.0 for target in found):
        raise OptionError(
            f"--targets is {text!r}: must be comma-separated scores in %, above 0 and at most 100, such as 75,80"
        )
    return found
