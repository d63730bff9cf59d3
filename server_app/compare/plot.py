"""The plots of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.compare.page import comparison_setting
from server_app.compare.table import headline, points_of_lines, times_of_lines
from server_app.report.cost_plots import LEAST_SECONDS, differ_in_cost, plot_communication, plot_server_time
from server_app.report.drawing import COLOURS, legend_beside, row_figure, save_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from server_app.compare.table import Line

PLOTS = ("comparison", "communication", "cost")  # the names of the files without their suffix


def draw_comparison(
    folder: Path, facts: Mapping[str, Any], lines: Sequence[Line], log: Callable[[str], None]
) -> dict[str, str]:
    """Draw the plots of a comparison into its folder; one that fails is a line of the log.

    Args:
        folder: The comparison's.
        facts: The content of compare.json.
        lines: The lines of its table.
        log: Takes a line for the user.

    Returns:
        The files by their keys in compare.json, "" for a plot that is not drawn.
    """
    points, times = points_of_lines(lines, facts["own"]), times_of_lines(lines)
    scored = any(line.accuracies for line in lines)
    draw: list[Callable[[], Figure | None]] = [
        lambda: plot_comparison(lines, headline(facts)) if scored else None,
        lambda: plot_communication(points) if differ_in_cost(points) else None,
        lambda: plot_server_time(times) if differ_in_cost(times, LEAST_SECONDS) else None,
    ]
    drawn = save_all(folder, dict(zip(PLOTS, draw, strict=True)), comparison_setting(facts), log)
    files = [file if (file := f"{name}.png") in drawn else "" for name in PLOTS]
    return dict(zip(("plot", "communication_plot", "cost_plot"), files, strict=True))


def plot_comparison(lines: Sequence[Line], title: str) -> Figure:
    """Draw the mean of every line with its spread, and each result as a dot."""
    figure, axes, points = row_figure([line.name for line in lines])
    farthest = 0.0
    for place, line in enumerate(lines):
        mean, spread, scores = line.accuracy or 0.0, line.spread or 0.0, line.accuracies or ()
        axes.barh(place, mean, color=COLOURS[line.kind], label=line.kind)
        if line.spread is not None:
            axes.errorbar(mean, place, xerr=spread, color="black", capsize=3, linewidth=1.2)
            axes.scatter(
                scores, [place] * len(scores), s=9, color="white", edgecolors="black", linewidths=0.6, zorder=3
            )
        end = max(mean + spread, *scores, 0.0)
        farthest = max(farthest, end)
        axes.annotate(line.accuracy_text, (end, place), (5, 0), textcoords="offset points", va="center", size=points)
    limit = 1.25 * max(farthest, 1.0)  # leaves space for the number of the longest bar
    axes.set_xlim(0.0, limit)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0.0 <= tick <= min(limit, 100.0)])
    several = ": mean, sample standard deviation, single results" * any(line.spread is not None for line in lines)
    axes.set_xlabel(f"accuracy on held-out examples, %{several}")
    axes.set_title(title)
    legend_beside(axes)
    return figure
