"""Draw docs/lab/same-uploads.svg from the table of docs/lab/same-uploads.md: ``python tests/bench/tally_plot.py``.

Accuracy of some methods, a panel per data set: the page's figures, which are read and not repeated
here. ``python tests/bench/tally_plot.py FILE.png`` draws elsewhere, in the format of the name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from server_app.report.drawing import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PLOT = DOCS / "lab" / "same-uploads.md", DOCS / "lab" / "same-uploads.svg"
ENSEMBLES = (
    "FedENS", "IntactOFL", "IntactOFL's experts, gate on predictions", "Tally ensemble, estimated counts",
    "Label-count ensemble", "Tally ensemble", "FENS, 20 rounds with the clients",
)  # fmt: skip
SHOWN = (
    *ENSEMBLES[:4], "DENSE", "Co-Boosting", "Tally, estimated counts",
    *ENSEMBLES[4:6], "Tally", ENSEMBLES[6],
)  # fmt: skip
# Text stays text, which is small; ids and dates are the same in every run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tally", "font.size": 9.0, "font.sans-serif": ["DejaVu Sans"]}


@dataclass(frozen=True)
class Cell:
    """A figure of the table."""

    mean: float
    spread: float
    text: str


def table_of(page: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the data sets of a page's first table, and name -> its cells as texts, CPU seconds last."""
    lines = page.splitlines()
    first = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first]
    return rows[0][1:-1], {row[0].strip("*"): row[1:] for row in rows[2:]}


def cell_of(text: str) -> Cell:
    """Return what a cell tells: ``82.2 ± 2.6``, or ``52.2*``."""
    found = re.fullmatch(r"([\d.]+)(?: ± ([\d.]+))?(\*?)", text)
    if found is None:
        raise ValueError(f"{text!r} is no figure of the table")
    return Cell(float(found[1]), float(found[2] or 0.0), found[1] + found[3])


def main(words: Sequence[str]) -> int:
    """Draw the figure; return the exit status."""
    target = Path(words[0]) if words else PLOT
    with rc_context(STYLE):
        figure = drawn(*table_of(PAGE.read_text()))
        figure.savefig(target, dpi=120, metadata={"Date": None} if target.suffix == ".svg" else None)
    return 0


def drawn(sets: Sequence[str], table: dict[str, list[str]]) -> Figure:
    """Return a figure with a panel per data set."""
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sets), sharey=True)
    for panel, (axes, name) in enumerate(zip(panels, sets, strict=True)):
        _draw(axes, [cell_of(table[row][panel]) for row in SHOWN])
        axes.set_title(name, fontsize=10)
    panels[0].set_yticks(range(len(SHOWN)), [row.replace(" with the clients", "") for row in SHOWN])
    panels[0].set_ylim(len(SHOWN) - 0.4, -0.6)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=2, fontsize="small", frameon=False)
    figure.supxlabel("accuracy on held-out images, %, and its sample standard deviation", fontsize=9)
    return figure


def _draw(axes: Axes, cells: Sequence[Cell]) -> None:
    """Draw a bar per row; Tally's stand out, and that of FENS, which asks clients again, is hatched."""
    for place, (name, cell) in enumerate(zip(SHOWN, cells, strict=True)):
        kind = "ensemble" if name in ENSEMBLES else "student"
        axes.barh(
            place,
            cell.mean,
            color=COLOURS[kind],
            alpha=1.0 if name.startswith("Tally") else 0.45,
            hatch="///" if name.startswith("FENS") else None,
            edgecolor="white",
            label={"Tally ensemble": "ensemble", "Tally": "one model"}.get(name),
        )
        if cell.spread:
            axes.errorbar(cell.mean, place, xerr=cell.spread, color="black", capsize=2, linewidth=1.0)
        axes.annotate(
            cell.text, (cell.mean + cell.spread, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(0, 108)
    axes.set_xticks(range(0, 101, 25))
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
