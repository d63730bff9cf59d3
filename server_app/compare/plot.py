"""The plot of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from server_app.report.drawing import COLOURS, legend_beside, row_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from server_app.compare.table import Line


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
