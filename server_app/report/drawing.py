"""Figures that every plot begins with: their size, their colours, and rows that can be read however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME_MOST = 28  # letters of a client's name; a longer one loses its middle
COLOURS = {"client": "#9aa5b1", "baseline": "#c97b3d", "ensemble": "#4c8c6b", "student": "#3566a8"}


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of so many inches, without the frame's upper and right side, and its axes."""
    # Imported late, and without pyplot: a server has no display and needs no plots to train.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def row_figure(names: Sequence[str], *, least: float = 0.0) -> tuple[Figure, Axes, float]:
    """Return a figure, at least so many inches high, with a row per name, and the size of the names in points."""
    # Rows are as high as the text needs, so that a hundred clients can still be read, in a figure that can be opened.
    inches = min(0.35, max(0.13, 14.0 / len(names)))
    points = min(10.0, 0.75 * 72 * inches)
    figure, axes = new_figure(8.0, max(least, 1.2 + inches * len(names)))
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=points)
    axes.set_ylim(len(names) - 0.4, -0.6)
    return figure, axes, points


def legend_beside(axes: Axes, **more: Any) -> None:
    """Put the legend to the right of the axes, each text once; ``more`` goes to matplotlib."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(),
        handles.keys(),
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize="small",
        frameon=False,
        **more,
    )


def short(name: str) -> str:
    """Return a name that has room in a figure."""
    return name if len(name) <= NAME_MOST else f"{name[: NAME_MOST // 2]}…{name[-NAME_MOST // 2 + 1 :]}"


def save(path: Path, figure: Figure) -> str:
    """Write a figure as a PNG and return the file's name."""
    figure.savefig(path, dpi=120)
    return path.name
