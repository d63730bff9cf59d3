"""Draw docs/lab/backbone-partitions.svg from docs/results/: ``python tests/bench/feature_plot.py``.

Left: accuracy over the skew of the classes, heads in closed form beside trained heads on the same features. Right:
accuracy over the bytes that a client sends. ``python tests/bench/feature_plot.py FILE.png`` draws elsewhere.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_tables import DOCS, RESULTS
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tally_plot import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT = DOCS / "lab" / "backbone-partitions.svg"
LINES = {
    "ridge": ("ridge, from sums", "#3566a8", "o"),
    "label_counts": ("trained heads by label counts", "#4c8c6b", "s"),
    "fedens": ("mean of their posteriors", "#8a6bb0", "^"),
    "averaged": ("their average, as in FedAvg", "#c97b3d", "v"),
    "alone": ("one client alone", "#9aa5b1", "x"),
}
SENT_BY_A_HEAD = 4 * 513 * 10 / 1024  # KiB of a linear head of 512 features and 10 classes in float32


def stored(name: str) -> dict[str, Any]:
    """Return a file of docs/results/."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def mean_of(rows: Sequence[dict[str, Any]], key: str, clients: int, alpha: float) -> float:
    """Return the mean accuracy over the seeds."""
    return statistics.fmean(row[key] for row in rows if (row["clients"], row["alpha"]) == (clients, alpha))


def drawn(rivals: dict[str, Any], features: dict[str, Any]) -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.1))
    for axes, clients in zip(panels, (10, 1000), strict=False):
        _over_alpha(axes, rivals["rows"], clients)
        axes.set_title(f"{clients:,} clients", fontsize=10)
    _over_bytes(panels[2], features["upload"], rivals["rows"])
    panels[0].set_ylabel("accuracy on the test images, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.suptitle(
        f"CIFAR-10, {rivals['train']:,} training images, EfficientNet-lite0 trained on ImageNet, {rivals['features']} "
        "features, mean of three seeds",
        fontsize=9,
    )
    return figure


def _over_alpha(axes: Axes, rows: Sequence[dict[str, Any]], clients: int) -> None:
    alphas = sorted({row["alpha"] for row in rows})
    for key, (label, colour, marker) in LINES.items():
        means = [mean_of(rows, key, clients, alpha) for alpha in alphas]
        axes.plot(range(len(alphas)), means, color=colour, marker=marker, label=label)
    axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set_xlabel("Dirichlet alpha: less is more skewed")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _over_bytes(axes: Axes, uploads: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    _, colour, marker = LINES["ridge"]
    axes.plot([row["kib"] for row in uploads], [row["ridge"] for row in uploads], color=colour, marker=marker)
    for row in uploads:
        axes.annotate(str(row["features"]), (row["kib"], row["ridge"]), (0, -13), textcoords="offset points",
                      ha="center", fontsize=8)  # fmt: skip
    for key, (_, tint, sign) in list(LINES.items())[1:4]:
        axes.plot(SENT_BY_A_HEAD, mean_of(rows, key, 10, 0.1), color=tint, marker=sign)
    axes.set_xscale("log")
    axes.set_xlabel("KiB that a client sends, by features")
    axes.set_title("10 clients, alpha 0.1", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main(words: Sequence[str]) -> None:
    """Draw the figure."""
    target = Path(words[0]) if words else PLOT
    with rc_context({**STYLE, "svg.hashsalt": "features"}):
        figure = drawn(stored("feature_rivals"), stored("features"))
        figure.savefig(target, dpi=120, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main(sys.argv[1:])
