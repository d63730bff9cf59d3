"""The page of a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.compare.sources import info_of
from server_app.compare.table import (
    Line,
    best_of,
    differences_table,
    headline,
    points_of_lines,
    table_of,
    times_of_lines,
)
from server_app.report.client_scores import results_table, summary_line
from server_app.report.communication import LEAST_SECONDS, differ_in_cost, plot_communication, plot_server_time
from server_app.report.drawing import COLOURS, legend_beside, row_figure, save_all
from server_app.report.page import Page, known_facts, plots_of, software_facts
from server_app.report.tables import Table, scale_of, setting_line, titled
from server_app.settings.text import to_toml
from strategies.core.facts import in_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
                f"{best.score_text}{' %' * in_percent(best.metric)}",
                f"{best.name}, the best here by {titled(best.metric).partition(',')[0]}",
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
        lambda: plot_communication(points, metric=metric) if differ_in_cost(points) else None,
        lambda: plot_server_time(times, metric) if differ_in_cost(times, LEAST_SECONDS) else None,
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
