"""The common parts of all plots: figures, colours, legends, and rows that stay legible at any number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME_MOST = 28  # letters of a client's name; the middle of a longer one is cut
COLOURS = {"client": "#9aa5b1", "baseline": "#c97b3d", "ensemble": "#4c8c6b", "student": "#3566a8"}


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of this size in inches, and its axes without the frame's upper and right side."""
    # Imported here and without pyplot, because a server has no display and needs no plots to train.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def row_figure(names: Sequence[str], *, least: float = 0.0) -> tuple[Figure, Axes, float]:
    """Return a figure at least ``least`` inches high with a row per name, its axes, and the names' size in points."""
    # Rows are as high as their text needs, so a hundred clients stay legible in a figure of usable size.
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
    """Return a name, shortened to fit into a figure."""
    return name if len(name) <= NAME_MOST else f"{name[: NAME_MOST // 2]}…{name[-NAME_MOST // 2 + 1 :]}"


def save(path: Path, figure: Figure) -> str:
    """Write a figure as a PNG and return the file's name."""
    figure.savefig(path, dpi=120)
    return path.name
