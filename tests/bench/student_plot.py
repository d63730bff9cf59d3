"""Draw docs/lab/number-of-images.svg from docs/results/tally_student.json: ``python tests/bench/student_plot.py``.

The accuracy of Tally's student over the number of different images that it learns from, at equal steps, a panel per
data set. ``python tests/bench/student_plot.py FILE.png`` draws elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_plot import stored
from feature_tables import DOCS, KINDS
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tally_plot import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT = DOCS / "lab" / "number-of-images.svg"
LINES = {"noise": ("#9aa5b1", "x"), "spanned": ("#3566a8", "o"), "real": ("#4c8c6b", "s")}


def drawn(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return the figure for the rows of other numbers of images."""
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    figure = Figure(figsize=(3.0 + 3.0 * len(cells), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(cells), squeeze=False)[0]
    for axes, cell in zip(panels, cells, strict=True):
        _over_counts(axes, [row for row in rows if row["cell"] == cell])
        axes.set_title(cell, fontsize=10)
    panels[0].set_ylabel("accuracy on the report half, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), fontsize="small", frameon=False)
    return figure


def _over_counts(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for kind, (colour, marker) in LINES.items():
        own = sorted((row["count"], row["student"]["report"]) for row in rows if row["images"] == kind)
        axes.plot(*zip(*own, strict=True), color=colour, marker=marker, label=KINDS[kind])
    axes.axhline(rows[0]["ensemble"]["report"], color="black", linewidth=1.0, linestyle="--", label="the ensemble")
    counts = sorted({row["count"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8)
    axes.set_xlabel(f"different images, read in {rows[0]['steps']:,} steps")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main(words: Sequence[str]) -> None:
    """Draw the figure."""
    target = Path(words[0]) if words else PLOT
    with rc_context({**STYLE, "svg.hashsalt": "tally-images"}):
        figure = drawn([row for row in stored("tally_student")["rows"] if row.get("count")])
        figure.savefig(target, dpi=120, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main(sys.argv[1:])
