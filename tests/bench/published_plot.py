"""Draw docs/lab/long-server-stages.svg from docs/results/published.json: ``python tests/bench/published_plot.py``.

Students on the uploads of clients of 300 local epochs, Fashion-MNIST at alpha 0.1. Left: accuracy over the student's
steps, seed 0. Right: accuracy over the CPU seconds of a finished server stage without a GPU, a point per seed.
``python tests/bench/published_plot.py FILE.png`` draws elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_tables import DOCS, stored
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from run_tables import OTHERS
from tally_plot import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT = DOCS / "lab" / "long-server-stages.svg"
CELL = ("fashion-mnist", 0.1)  # data and alpha
# A row's name -> its label, the outcome that the curve shows, its colour and its marker.
STUDENTS = {
    "tally, read off": ("Tally", "Tally", "#3566a8", "o"),
    "tally, spans": ("Tally, images in the update spans", "Tally", "#4c8c6b", "s"),
    "dense": ("DENSE", "DENSE", "#c97b3d", "^"),
    "co-boosting": ("Co-Boosting", "Co-Boosting", "#8a6bb0", "v"),
}
# Ensembles as lines: a row's name, one of its outcomes, and the line.
TEACHERS = {
    "Tally ensemble, estimated counts": ("tally, read off", "Tally ensemble", "--"),
    "mean of logits": ("fedens", "FedENS", ":"),
}
EPOCHS = 500  # of DENSE and Co-Boosting, whose pool grows by a batch per epoch


def steps(row: dict[str, Any], epoch: int) -> float:
    """Return the student's steps up to an epoch's end.

    Raises:
        ValueError: They are not the steps that the finished run has counted.
    """
    last, grows = row["curve"][-1][0], row["name"].partition(OTHERS)[0] in ("dense", "co-boosting")
    whole = EPOCHS * (EPOCHS + 1) / 2 if grows else row["student_steps"]
    if row.get("student_steps", whole) != whole:
        raise ValueError(f"{row['name']} took {row['student_steps']} steps, not one more in every epoch")
    return epoch * (epoch + 1) / 2 if grows else whole * epoch / last


def drawn(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return the figure for the rows of one data set and skew."""
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    first = {row["name"]: row for row in rows if row["seed"] == 0}
    _over_steps(left, first)
    _over_seconds(right, rows)
    for axes in (left, right):
        for title, (name, outcome, line) in TEACHERS.items():
            own = first[name]["accuracy"][outcome]
            axes.axhline(own, color="black", linewidth=1.0, linestyle=line, label=f"{title}, seed 0")
        axes.set_xscale("log")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("accuracy on the report half, %")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def shown(first: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the row of a method's curve: where the one on the tables' clients was stopped, that on other clients."""
    row = first[name]
    return row if row["accuracy"] else first.get(name + OTHERS, row)


def _over_steps(axes: Axes, first: dict[str, dict[str, Any]]) -> None:
    for name, (label, _, colour, marker) in STUDENTS.items():
        row = shown(first, name)
        curve = [(steps(row, epoch), accuracy) for epoch, accuracy in row["curve"]]
        cut = "" if row["accuracy"] else f", {row['curve'][-1][0]} epochs so far"
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, markersize=4, label=label + cut)
    axes.set_xlabel("steps of the student, seed 0")


def _over_seconds(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for name, (_, outcome, colour, marker) in STUDENTS.items():
        own = [row for row in rows if row["name"].partition(OTHERS)[0] == name and row["accuracy"]]
        points = [(row["server_cpu_s"], row["accuracy"][outcome]) for row in own if "server_cpu_s" in row]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle="")
    axes.set_xlabel("CPU seconds of a server stage without a GPU, a point per seed")


def main(words: Sequence[str]) -> None:
    """Draw the figure."""
    target = Path(words[0]) if words else PLOT
    rows = [row for row in stored("published")["rows"] if (row["data"], row["alpha"]) == CELL]
    with rc_context({**STYLE, "svg.hashsalt": "published"}):
        figure = drawn(rows)
        figure.savefig(target, dpi=120, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main(sys.argv[1:])
