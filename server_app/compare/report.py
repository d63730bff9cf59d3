"""What a comparison shows: its lines, with means and spreads over the runs and seeds, its table, page and plots."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from server_app.launch.console import TableFormat
from server_app.report.client_scores import results_table, summary_line
from server_app.report.communication import LEAST_SECONDS, Curve, Point, differ_in_cost, plot_costs
from server_app.report.drawing import COLOURS, legend_beside, row_figure, save_all
from server_app.report.page import Page, known_facts, plots_of, software_facts
from server_app.report.tables import (
    Table,
    best_headline,
    gain_text,
    places_of,
    scale_of,
    setting_line,
    titled,
    unit_of,
    worded,
    write_out,
)
from server_app.report.tables import headline as headline_score
from server_app.settings.catalogue import to_toml
from server_app.settings.read import default_settings, scaled_line
from strategies.core.facts import HEADLINES, in_percent
from strategies.run.results import COMPARISON_FILE
from strategies.run.run_folder import info_of
from strategies.scores.values import LOWER_IS_BETTER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Amounts of a cell -> digits of their mean.
WORK = ("teacher_forward", "teacher_backward", "student_steps", "generator_steps")
AMOUNTS = {"server_s": 2, "server_cpu_s": 2, "peak_mib": 2, "gpu_mib": 2, "mib_per_client": 6, **dict.fromkeys(WORK, 1)}
TEXTS = 2  # the columns after these hold numbers


@dataclass(frozen=True)
class Line:
    """One line of the table: one kind of outcome of one method.

    Attributes:
        kind: ``"baseline"``, ``"ensemble"`` or ``"student"``.
        accuracies: Accuracy of every cell on its held-out images, in %; None for runs of another project.
        best_accuracy: Mean over the cells of the best server epoch's accuracy, in %; None without epochs.
        amounts: Means of :data:`AMOUNTS`: seconds and CPU seconds (of all threads) of the server stage, peak memory of
            its process in MiB (of torch on the GPU: 0 without one), MiB that a client sent and received for the result,
            and the counts of :data:`WORK`.
        uploads: The fewest and the most of a cell.
        metric: The headline score of all cells; ``"accuracy"`` where cells differ.
        scores: That of every cell, in % or in its own unit; None if one lacks it.
        best_score: Its mean over the cells' best server epochs.

    A number that was not measured in every cell is None.
    """

    name: str
    method: str
    kind: str
    results: int
    accuracies: tuple[float, ...] | None
    best_accuracy: float | None
    amounts: Mapping[str, float | None]
    uploads: tuple[int, int]
    metric: str = "accuracy"
    scores: tuple[float, ...] | None = None
    best_score: float | None = None

    @property
    def accuracy(self) -> float | None:
        """The mean over the cells, in %."""
        return _mean(self.accuracies, 2)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation over the cells (n - 1), in %; None for a single one."""
        return _spread(self.accuracies, 2)

    @property
    def score(self) -> float | None:
        """The mean of the headline score over the cells, in % or in its own unit."""
        return _mean(self.scores, places_of(self.metric))

    @property
    def score_spread(self) -> float | None:
        """The sample standard deviation of the headline score; None for a single one."""
        return _spread(self.scores, places_of(self.metric))

    @property
    def score_text(self) -> str:
        """Mean and spread of the headline score as text."""
        return _mean_and_spread(self.score, self.score_spread, places_of(self.metric))

    def as_json(self) -> dict[str, Any]:
        """Return the line for compare.json and the CSV."""
        return {
            "method": self.method,
            "name": self.name,
            "kind": self.kind,
            "results": self.results,
            "accuracy": self.accuracy,
            "accuracy_spread": self.spread,
            "metric": self.metric,
            "score": self.score,
            "score_spread": self.score_spread,
            "best_accuracy": self.best_accuracy,
            "best_score": self.best_score,
            "uploads": uploads_text(self.uploads),
            **self.amounts,
        }

    def shown(self, to_best: Mapping[str, float] | None, metric: str) -> dict[str, str]:
        """Return the line for the printed table, a text for each column.

        Args:
            to_best: By how much it is better than the best line, with the ends of the interval.
            metric: The score in which it is.
        """
        return {
            "method": self.name,
            "kind": self.kind,
            "n": str(self.results),
            titled("accuracy"): _mean_and_spread(self.accuracy, self.spread, 2),
            titled(self.metric): self.score_text,
            _behind(metric): _difference(to_best, metric),
            _best_of_epochs(self): _text(self.best_score, places_of(self.metric)),
            "wall, s": _text(self.amounts["server_s"], 1),
            "CPU, s": _text(self.amounts["server_cpu_s"], 1),
            "MiB": _text(self.amounts["peak_mib"], 0),
            "MiB/client": "-" if (mib := self.amounts["mib_per_client"]) is None else f"{mib:.3g}",
            "uploads": uploads_text(self.uploads),
            **{_column_of(name): _text(self.amounts[name], 0) for name in WORK},
        }


def _best_of_epochs(line: Line) -> str:
    return ", ".join(filter(None, ("best", unit_of(line.metric))))


def _mean_and_spread(mean: float | None, spread: float | None, digits: int) -> str:
    return _text(mean, digits) + ("" if spread is None else f" ± {spread:.{digits}f}")


def _column_of(work: str) -> str:
    return work.replace("_", " ")


def lines_of(cells: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the lines of finished cells, in the order of the first cells of methods and outcomes."""
    methods = dict.fromkeys(cell["method"] for cell in cells)
    metrics = {cell.get("metric", "accuracy") for cell in cells}
    metric = metrics.pop() if len(metrics) == 1 else "accuracy"
    rows = [
        {**{name: cell.get(name) for name in AMOUNTS}, **_best(cell, outcome, metric), "uploads": cell["uploads"],
         "score": headline_score(outcome, metric), "method": method,
         **{key: outcome[key] for key in ("name", "kind", "accuracy")}}
        for method in methods
        for cell in cells if cell["method"] == method
        for outcome in cell["outcomes"]
    ]  # fmt: skip
    if not rows:
        return []
    groups = pd.DataFrame(rows).groupby(["name", "method", "kind"], sort=False)
    return [_line((str(name), str(method), str(kind)), group, metric) for (name, method, kind), group in groups]


def _best(cell: Mapping[str, Any], outcome: Mapping[str, Any], metric: str) -> dict[str, Any]:
    # Both epochs of a student and rounds with clients have a best score.
    known = outcome["kind"] == "student" or "options" in cell
    found = {"best_accuracy": cell["best_accuracy"], "best_score": best_headline(cell, metric)}
    return found if known else dict.fromkeys(found)


def _line(key: tuple[str, str, str], group: pd.DataFrame, metric: str) -> Line:
    numbers = group[[*AMOUNTS, "best_accuracy", "best_score"]].astype(float)
    name, method, kind = key
    return Line(
        name,
        method,
        kind,
        results=len(group),
        accuracies=_all(group["accuracy"]),
        best_accuracy=_rounded(numbers["best_accuracy"].mean(), 2),
        # An amount that a cell could not measure has no mean.
        amounts={key: _rounded(numbers[key].mean(skipna=False), digits) for key, digits in AMOUNTS.items()},
        uploads=(int(group["uploads"].min()), int(group["uploads"].max())),
        metric=metric,
        scores=_all(group["score"]),
        best_score=_rounded(numbers["best_score"].mean(), places_of(metric)),
    )


def _all(numbers: pd.Series) -> tuple[float, ...] | None:
    return tuple(map(float, numbers)) if numbers.notna().all() else None


def _mean(numbers: Sequence[float] | None, digits: int) -> float | None:
    return _rounded(pd.Series(numbers).mean(), digits) if numbers else None


def _spread(numbers: Sequence[float] | None, digits: int) -> float | None:
    return _rounded(pd.Series(numbers).std(), digits) if numbers and len(numbers) > 1 else None


def _rounded(value: float, digits: int) -> float | None:
    # First to nine digits: a tie at the last one is a tie, whatever the order of the sum.
    return None if pd.isna(value) else round(round(float(value), 9), digits)


def best_of(lines: Sequence[Line]) -> Line | None:
    """Return the line with the best mean headline score, the least log loss; None if none has a score.

    None also for a score of the user's own, of which is not known whether more or less is better.
    """
    scored = [line for line in lines if line.score is not None and line.metric in HEADLINES]
    sign = -1 if any(line.metric in LOWER_IS_BETTER for line in scored) else 1
    return max(scored, key=lambda line: sign * (line.score or 0.0), default=None)


def times_of_lines(lines: Sequence[Line]) -> list[Point]:
    """Return the headline score over the server stage's CPU time of every line that has both."""
    return [
        Point(line.name, line.kind, seconds, line.score, line.score_spread)
        for line in lines
        if line.score is not None and (seconds := line.amounts["server_cpu_s"]) is not None
    ]


def points_of_lines(lines: Sequence[Line], own: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the headline score over the communication of every line that has both."""
    curves: dict[str, list[Curve]] = {}
    alike = [facts for facts in own if lines and facts.get("metric", "accuracy") == lines[0].metric]
    for outcome in (outcome for facts in alike for outcome in facts["outcomes"] if outcome.get("curve")):
        curves.setdefault(outcome["name"], []).append(tuple((mib, score) for mib, score in outcome["curve"]))
    return [
        Point(line.name, line.kind, mib, line.score, line.score_spread, tuple(curves.get(line.name, ())))
        for line in lines
        if line.score is not None and (mib := line.amounts["mib_per_client"])
    ]


def uploads_text(uploads: tuple[int, int]) -> str:
    """Return the number of uploads: ``10``, or ``9-10`` if runs differ."""
    fewest, most = uploads
    return str(fewest) if fewest == most else f"{fewest}-{most}"


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def headline(comparison: Mapping[str, Any]) -> str:
    """Return the title of a comparison: ``Methods on the same uploads (digits): 3 runs, 1 seed``."""
    data, runs, seeds = comparison["data"], len(comparison["runs"]), comparison["seeds"]
    counts = ", ".join(f"{n} {what}{'s' * (n > 1)}" for n, what in ((runs, "run"), (seeds, "seed")))
    return f"Methods on the same uploads{f' ({data})' if data else ''}: {counts}"


def table_of(comparison: Mapping[str, Any], lines: Sequence[Line], *, work: bool = False) -> Table:
    """Return the table of a comparison."""
    scored = any(line.scores or line.accuracies for line in lines)
    cells = [*comparison["cells"], *comparison.get("own", [])]
    threads = "/".join(map(str, sorted({cell["threads"] for cell in cells})))
    metric = comparison.get("best", {}).get("metric", "accuracy")
    accurate = any(line.accuracy is not None for line in lines)
    best = any(line.best_score is not None for line in lines)
    notes = [
        *([f"{differing_line(apart)}."] if (apart := comparison.get("differing")) else []),
        f"{'Accuracy' if accurate else 'Scores'} on held-out examples: mean ± sample standard deviation of n results."
        if scored
        else _why_unscored(comparison),
        *(
            [
                f"To the best: the difference of {worded(metric)} on the same held-out examples, "
                f"{'below 0 where it is worse, ' * (metric in LOWER_IS_BETTER)}with its 95 % interval over these "
                "examples; a tie if the interval holds 0.",
                *(
                    [f"Some results lack their {worded(lines[0].metric)} by example, as those of earlier versions."]
                    * (metric != lines[0].metric)
                ),
            ]
            if comparison.get("to_best")
            else []
        ),
        *(["Methods without random draws have one result per run."] if comparison["seeds"] > 1 else []),
        *(["Best: the mean of the best server epochs, chosen on the held-out examples themselves."] if best else []),
        f"Wall and CPU: mean seconds of the server stage, its tests after every epoch included, on {threads} "
        f"thread{'s' * (threads != '1')}. MiB: mean peak memory of its process, Python and torch included.",
        "MiB/client: mean MiB that a client sent and received for the result; a replay has the cost of its uploads.",
        *(["As run: the runs' own results, with their clients."] if comparison.get("own") else []),
        *dict.fromkeys(_as_run(own) for own in comparison.get("own", []) if own["options"]),  # a foreign run has none
        *_scaled(cells),
        *(f"Without {name}: {reason}." for name, reason in comparison["left_out"].items()),
    ]
    apart = comparison.get("to_best", {})
    shown = [line.shown(apart.get(line.name), metric) for line in lines]
    hidden = {*([] if apart else [_behind(metric)]), *([] if work else map(_column_of, WORK))}
    # A score of the user's own, or a machine without held-out examples, leaves columns without a number.
    scores = (name for line in lines for name in (titled("accuracy"), titled(line.metric), _best_of_epochs(line)))
    hidden |= {name for name in scores if all(texts[name] == "-" for texts in shown)}
    columns = [name for name in (shown[0] if shown else ()) if name not in hidden]
    rows = [[texts[name] for name in columns] for texts in shown]
    return Table(f"{headline(comparison)}.", columns, rows, texts=TEXTS, notes=notes)


def _why_unscored(comparison: Mapping[str, Any]) -> str:
    """Return why no result has an accuracy, and what gives one."""
    if comparison.get("results"):
        return (
            "No accuracies: the runs score on no held-out examples; the next table has the clients' scores on theirs."
        )
    if comparison["data"]:
        return (
            "No accuracies: the runs score on no held-out examples; --on clients has the runs' clients score the "
            "results on theirs."
        )
    return (
        "No accuracies: the runs are of another project, whose held-out examples are missing here; --evaluate names a "
        "function that has them."
    )


def differences_table(comparison: Mapping[str, Any]) -> list[Table]:
    """Return the table of how much better every line is than the best one, by every score; none without one."""
    if not (found := comparison.get("differences")):
        return []
    metrics = [name for name in HEADLINES if any(name in scores for scores in found.values())]
    columns = ["method", *(titled(name, apart=True) for name in metrics)]
    rows = [[line, *(_difference(scores.get(name), name) for name in metrics)] for line, scores in found.items()]
    notes = [
        "Above 0: better than the best line. 95 % intervals over the same held-out examples; a tie "
        "if the interval holds 0."
    ]
    best = comparison["best"]["name"]
    return [Table(f"Compared with {best}", columns, rows, notes=notes)]


def _behind(metric: str) -> str:
    return f"to the best, {unit_of(metric, apart=True)}"


def _difference(found: Mapping[str, float] | None, metric: str) -> str:
    return "-" if found is None else f"{gain_text(found, metric)}{', tie' * (found['low'] <= 0 <= found['high'])}"


def differing_line(settings: Mapping[str, Sequence[Any]]) -> str:
    """Return a sentence on the settings in which the runs differ: name -> values."""
    named = ", ".join(f"{name} ({', '.join(map(repr, values))})" for name, values in settings.items())
    return f"The runs differ in {named}: a mean over them is not one over repetitions"


def _as_run(own: Mapping[str, Any]) -> str:
    """Return a sentence on the options of a run's own result that are not the app's defaults."""
    defaults = default_settings()
    changed = [f"{key}={to_toml(value)}" for key, value in own["options"].items() if defaults.get(key) != value]
    return f"{own['outcomes'][-1]['name']}: {' '.join(changed) or 'with the default options'}."


def _scaled(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on every schedule that the setting ``scale`` has shortened, and on how many results have it."""
    results = Counter(cell["method"] for cell in cells)
    found = Counter((cell["method"], scaled_line(cell["scaled"])) for cell in cells if "scaled" in cell)
    return [
        f"Scaled, {method}{f' ({n} of {results[method]} results)' if n < results[method] else ''}: {text}."
        for (method, text), n in found.items()
    ]


def print_comparison(comparison: Mapping[str, Any], format: TableFormat) -> None:  # noqa: A002
    """Print a comparison; every format but text prints only the comparison on standard output."""
    lines = lines_of([*comparison["cells"], *comparison.get("own", [])])
    write_out(
        lambda: table_of(comparison, lines, work=format == "md"),
        format,
        facts=comparison,
        rows=lambda: [line.as_json() for line in lines],
    )
    if format != "text":
        return
    plots = {"page": "page", "plot": "plot", "communication": "communication_plot", "cost": "cost_plot"}
    found = ((what, comparison.get(key)) for what, key in plots.items())
    for what, path in (*found, ("results", COMPARISON_FILE)):
        if path:
            sys.stdout.write(f"{what:<14} {comparison['compare_dir']}/{path}\n")


def comparison_setting(facts: Mapping[str, Any]) -> str:
    """Return the line below the titles of a comparison: data, split and clients of its runs, seeds of its results."""
    infos = [info_of(Path(run)) for run in facts["runs"]]
    seeds = [cell["seed"] for cell in (*facts["cells"], *facts["own"])]
    return setting_line(
        [info.get("settings", {}) for info in infos], [info.get("num-supernodes") or 0 for info in infos], seeds
    )


def comparison_page(facts: Mapping[str, Any], lines: Sequence[Line]) -> Page:
    """Return the page of a comparison."""
    folder = Path(facts["compare_dir"])
    best = best_of(lines)
    strong = frozenset(place for place, line in enumerate(lines) if line is best)
    table = replace(table_of(facts, lines), heading="Results", strong=strong)
    figures = (
        []
        if best is None
        else [
            (
                f"{best.score_text} {unit_of(best.metric)}".rstrip(),
                f"{best.name}, the best here by {worded(best.metric)}",
            )
        ]
    )
    figures += [(str(len(facts["methods"])), "methods"), (str(len(facts["cells"])), "results computed")]
    settings = " ".join(f"{key}={to_toml(value)}" for key, value in facts["settings"].items())
    own = {"runs": ", ".join(facts["runs"]), "changed settings": settings, "folder": facts["compare_dir"]}
    return Page(
        kind="Comparison",
        title=headline(facts).partition(":")[0],
        setting=comparison_setting(facts),
        figures=figures,
        facts=[*known_facts(own), *software_facts(info_of(Path(facts["runs"][0])))],
        warnings=[facts["error"]] if "error" in facts else [],
        tables=[table, *_of_clients(facts.get("results", ())), *differences_table(facts)],
        plots=plots_of(folder, [facts["plot"], facts["communication_plot"], facts["cost_plot"]]),
        commands=_commands(facts, best),
    )


def _of_clients(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the table of the clients' scores, with a sentence for each result; none where no client was asked."""
    if not results:
        return []
    table = results_table(results)
    said = [f"{each['method']}, seed {each['seed']}: {summary_line(each['evaluation'])}" for each in results]
    return [replace(table, notes=[*table.notes, *said])]


def _commands(facts: Mapping[str, Any], best: Line | None) -> list[tuple[str, str]]:
    again, more = facts["command"], facts["seeds"] + 2
    found = [("The same with more seeds", again.replace(_seeds(facts["seeds"]), _seeds(more)))]
    if best is not None and best.method in facts["methods"]:
        words = shlex.split(again)
        shared = words[words.index("--seeds") + 2 : words.index("--out")]  # the settings, and a foreign run's own code
        alone = ["oneshot", "replay", facts["runs"][0], "--method", best.method, *shared]
        found.append(("The best of them alone", shlex.join(alone)))
    options = [("All options of a method", f"oneshot methods {name}") for name in facts["methods"][:1]]
    return [*found, *options]


def _seeds(count: int) -> str:
    return f" --seeds {count}"


PLOTS = ("comparison", "communication", "cost")  # the names of the files without their suffix


def draw_comparison(
    folder: Path, facts: Mapping[str, Any], lines: Sequence[Line], log: Callable[[str], None]
) -> dict[str, str]:
    """Draw the plots of a comparison into its folder; one that fails is a line of the log.

    Returns:
        The files by their keys in compare.json, "" for a plot that is not drawn.
    """
    points, times = points_of_lines(lines, facts["own"]), times_of_lines(lines)
    scored, metric = any(line.scores for line in lines), lines[0].metric if lines else "accuracy"
    draw: list[Callable[[], Figure | None]] = [
        lambda: plot_comparison(lines, headline(facts)) if scored else None,
        lambda: plot_costs(points, metric=metric) if differ_in_cost(points) else None,
        lambda: plot_costs(times, "time", metric=metric) if differ_in_cost(times, LEAST_SECONDS) else None,
    ]
    drawn = save_all(folder, dict(zip(PLOTS, draw, strict=True)), comparison_setting(facts), log)
    files = [file if (file := f"{name}.png") in drawn else "" for name in PLOTS]
    return dict(zip(("plot", "communication_plot", "cost_plot"), files, strict=True))


def plot_comparison(lines: Sequence[Line], title: str) -> Figure:
    """Draw the mean headline score of every line with its spread, and each result as a dot."""
    figure, axes, points = row_figure([line.name for line in lines])
    farthest = 0.0
    for place, line in enumerate(lines):
        mean, spread, scores = line.score or 0.0, line.score_spread or 0.0, line.scores or ()
        axes.barh(place, mean, color=COLOURS[line.kind], label=line.kind)
        if line.score_spread is not None:
            axes.errorbar(mean, place, xerr=spread, color="black", capsize=3, linewidth=1.2)
            axes.scatter(
                scores, [place] * len(scores), s=9, color="white", edgecolors="black", linewidths=0.6, zorder=3
            )
        end = max(mean + spread, *scores, 0.0)
        farthest = max(farthest, end)
        axes.annotate(line.score_text, (end, place), (5, 0), textcoords="offset points", va="center", size=points)
    metric = lines[0].metric
    limit = 1.25 * max(farthest, 0.01 * scale_of(metric))  # leaves space for the number of the longest bar
    axes.set_xlim(0.0, limit)
    axes.set_xticks(
        [tick for tick in axes.get_xticks() if 0.0 <= tick <= (min(limit, 100.0) if in_percent(metric) else limit)]
    )
    several = ": mean, sample standard deviation, single results" * any(line.score_spread is not None for line in lines)
    axes.set_xlabel(f"{titled(metric, 'held-out examples')}{several}")
    axes.set_title(title)
    legend_beside(axes)
    return figure
