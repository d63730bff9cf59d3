"""The common parts of all plots: figures, colours, legends, and rows that stay legible at any number."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.project import FAILURES, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 180  # sharp at twice the width of a page's column
LETTERS_PER_INCH = 14  # of the line below a title
TITLE_LETTERS_PER_INCH = 9
INK = "#1d2733"
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


def save_all(
    folder: Path, plots: Mapping[str, Callable[[], Figure | None]], setting: str, log: Callable[[str], None]
) -> list[str]:
    """Draw plots, write each as a PNG and return their files; one that fails is a line of the log."""
    folder.mkdir(exist_ok=True)
    written = []
    for name, draw in plots.items():
        try:
            if (figure := draw()) is not None:
                written.append(save(folder / f"{name}.png", figure, setting))
        except FAILURES as error:
            log(f"plot {name}: not drawn, {one_line(error)}")
    return written


def save(path: Path, figure: Figure, setting: str = "") -> str:
    """Write a figure as a PNG and return the file's name."""
    from matplotlib.text import Text

    if setting:
        _head(figure, setting)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a "$" in a name of the data begins no formula
    figure.savefig(path, dpi=DPI)
    return path.name


def _head(figure: Figure, setting: str) -> None:
    """Put title and setting at the left above everything, in a strip by which the figure grows."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(setting, int(LETTERS_PER_INCH * width))
    axes = figure.axes[0]
    title = textwrap.wrap(axes.get_title(), int(TITLE_LETTERS_PER_INCH * width))
    below = 0.36 + 0.22 * max(0, len(title) - 1)
    strip = 0.04 + below + 0.17 * len(lines)
    figure.set_size_inches(width, height + strip)
    axes.set_title("")
    figure.get_layout_engine().set(rect=(0.0, 0.0, 1.0, height / (height + strip)))  # type: ignore[union-attr, call-arg]
    look: dict[str, Any] = {"ha": "left", "va": "top"}
    figure.text(
        0.1 / width, 1 - 0.1 / (height + strip), "\n".join(title), fontsize=12.5, fontweight="bold", color=INK, **look
    )
    figure.text(0.1 / width, 1 - below / (height + strip), "\n".join(lines), fontsize=9, color="#5b6875", **look)
