"""Plots of accuracy against cost: communication, as in Figure 2 of FENS (Allouah et al., 2024), and server time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from server_app.report.drawing import COLOURS, legend_beside, new_figure, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X<>ph8"
LEAST_SECONDS = 0.1  # lower end of the logarithmic axis; a method that trains nothing on the server takes less
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Point:
    """A result in a plot of accuracy against cost.

    Attributes:
        name: As in the result table.
        kind: ``"baseline"``, ``"ensemble"`` or ``"student"``.
        cost: MiB per client, up and down, for the result; or CPU seconds of the server stage.
        accuracy: Mean accuracy in %.
        spread: Sample standard deviation of the accuracies; None for a single one.
        curves: Cost and accuracy of the rounds before the result, a curve per run.
    """

    name: str
    kind: str
    cost: float
    accuracy: float
    spread: float | None = None
    curves: tuple[Curve, ...] = ()


def differ_in_cost(points: Sequence[Point], least: float = 0.0) -> bool:
    """Return whether a plot over the cost shows anything: two costs that differ, or a curve.

    Args:
        points: The points.
        least: The lower end of the axis, where lower costs are drawn too.
    """
    return len({f"{max(least, point.cost):.2g}" for point in points}) > 1 or any(point.curves for point in points)


def plot_communication(points: Sequence[Point]) -> Figure:
    """Draw every result over its communication cost; results of many rounds have a curve.

    Args:
        points: At least one; each has a positive cost.

    Returns:
        A figure whose horizontal axis is logarithmic, in MiB per client; bars are sample standard deviations.
    """
    figure, axes = _plot(points)
    axes.set_xlabel("MiB per client: all messages, up and down; the result is not sent back")
    axes.set_title("Accuracy against communication")
    return figure


def plot_server_time(points: Sequence[Point]) -> Figure:
    """Draw every result over the CPU time of its server stage.

    Args:
        points: At least one; those below ``LEAST_SECONDS`` are drawn there, at the tick "≤ 0.1".

    Returns:
        A figure whose horizontal axis is logarithmic, in seconds; bars are sample standard deviations.
    """
    figure, axes = _plot([replace(point, cost=max(point.cost, LEAST_SECONDS)) for point in points], least=LEAST_SECONDS)
    axes.set_xlabel("CPU seconds of the server stage, all threads")
    axes.set_title("Accuracy against the server's time")
    return figure


def _plot(points: Sequence[Point], *, least: float = 0.0) -> tuple[Figure, Axes]:
    figure, axes = new_figure(8.0, max(4.0, 1.0 + 0.22 * len(points)))
    numbers = Counter[str]()
    # The best comes first, so the legend has the order of the figure.
    for point in sorted(points, key=lambda point: -point.accuracy):
        marker = MARKERS[numbers[point.kind] % len(MARKERS)]
        numbers[point.kind] += 1
        _draw(axes, point, marker)
    _scale(axes, points, least)
    axes.set_ylabel("accuracy on held-out examples, %")
    legend_beside(axes)
    return figure, axes


def _label(point: Point) -> str:
    spread = f" ± {point.spread:.1f}" if point.spread is not None else ""
    return f"{short(point.name)}, {point.accuracy:.1f}{spread} %"


def _draw(axes: Axes, point: Point, marker: str) -> None:
    colour = COLOURS[point.kind]
    for curve in point.curves:
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.0, alpha=0.7)
    # A method's student and ensemble cost the same; if they are equally good, the larger mark shows behind the other.
    behind = point.kind == "ensemble"
    axes.errorbar(
        point.cost,
        point.accuracy,
        yerr=point.spread,
        color=colour,
        marker=marker,
        markersize=9 if behind else 6,
        markeredgecolor="black",
        markeredgewidth=0.6,
        linestyle="none",
        elinewidth=1.2,
        capsize=3,
        zorder=2.1 if behind else 2.2,
        label=_label(point),
    )


def _scale(axes: Axes, points: Sequence[Point], least: float) -> None:
    """Make the horizontal axis logarithmic; its tick at ``least`` means that or less, and lower ticks have no label."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    costs = [cost for point in points for cost in (point.cost, *(cost for curve in point.curves for cost, _ in curve))]
    first, last = min(costs) / 2.5, 2.5 * max(costs)
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    # Over less than two decades the powers of ten alone would be too few ticks.
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if last / first > 100.0 else (1.0, 2.0, 5.0), numticks=12))

    def number(cost: float, _: object) -> str:
        if cost < 0.99 * least:
            return ""
        return f"≤ {cost:g}" if cost < 1.01 * least else f"{cost:g}"

    axes.xaxis.set_major_formatter(FuncFormatter(number))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="both", color="#e3e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
