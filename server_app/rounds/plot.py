"""Learning curves of runs in rounds, averaged over the seeds of each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server_app.report.drawing import new_figure
from server_app.rounds.table import RoundsLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.")
LEGEND_LETTERS = 38  # letters of a name per line
SINGLE = 30  # up to this number of tested rounds, each has a mark


def plot_rounds(lines: Sequence[RoundsLine], targets: Sequence[float]) -> Figure:
    """Draw the mean accuracy of every setting over the rounds, in a band of one sample deviation.

    If a run of a setting is unfinished, a longer run of the setting continues as a thin line.

    Args:
        lines: At least one line.
        targets: Accuracies in %, drawn as horizontal lines.
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
        axes.annotate(
            f"{target:g} %", (1.0, target), xycoords=("axes fraction", "data"), xytext=(-2, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize="x-small", color="#5f6b76",
        )  # fmt: skip
    axes.locator_params(axis="x", integer=True)
    tested = [test.number for line in lines for run in line.runs for test in run.tested]
    axes.set_xlim(min(tested) if len(set(tested)) > 1 else 0, max(tested))
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on held-out examples, %")
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
            places = [test.number for test in beyond], [test.accuracy for test in beyond]
            axes.plot(*places, **look, linewidth=0.8, alpha=0.6)
