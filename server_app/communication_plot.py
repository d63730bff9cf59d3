"""Accuracy against communication, as in Figure 2 of FENS (Allouah et al., NeurIPS 2024)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from server_app.communication import Point
from server_app.drawing import COLOURS, new_figure, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X<>ph8"


def plot_communication(points: Sequence[Point]) -> Figure:
    """Draw every result over what it cost a client, and those of many rounds with the way there.

    Args:
        points: At least one; each costs something.

    Returns:
        A figure whose horizontal axis is logarithmic, in MiB per client; bars are sample standard deviations.
    """
    figure, axes = new_figure(8.0, max(4.0, 1.0 + 0.22 * len(points)))
    numbers = Counter[str]()
    # The best first, as the eye finds them in the figure.
    for point in sorted(points, key=lambda point: -point.accuracy):
        marker = MARKERS[numbers[point.kind] % len(MARKERS)]
        numbers[point.kind] += 1
        _draw(axes, point, marker)
    _scale(axes, points)
    axes.set_xlabel("MiB per client: all messages, up and down; the result is not sent back")
    axes.set_ylabel("accuracy on held-out images, %")
    axes.set_title("Accuracy against communication")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    return figure


def _told(point: Point) -> str:
    spread = f" ± {point.spread:.1f}" if point.spread is not None else ""
    return f"{short(point.name)}, {point.accuracy:.1f}{spread} %"


def _draw(axes: Axes, point: Point, marker: str) -> None:
    colour = COLOURS[point.kind]
    for curve in point.curves:
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.0, alpha=0.7)
    axes.errorbar(
        point.mib,
        point.accuracy,
        yerr=point.spread,
        color=colour,
        marker=marker,
        markersize=7,
        markeredgecolor="black",
        markeredgewidth=0.6,
        linestyle="none",
        elinewidth=1.2,
        capsize=3,
        label=_told(point),
    )


def _scale(axes: Axes, points: Sequence[Point]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    amounts = [mib for point in points for mib in (point.mib, *(mib for curve in point.curves for mib, _ in curve))]
    least, most = min(amounts) / 2.5, 2.5 * max(amounts)
    axes.set_xscale("log")
    axes.set_xlim(least, most)
    # Over less than two decades the powers of ten alone would be too few numbers to read.
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if most / least > 100.0 else (1.0, 2.0, 5.0), numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda mib, _: f"{mib:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="both", color="#e3e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
