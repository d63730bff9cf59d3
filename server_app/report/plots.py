"""The plots of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from server_app.report.communication import Point, differ_in_cost, plot_costs, tested_rounds
from server_app.report.drawing import COLOURS, legend_beside, new_figure, row_figure, short
from server_app.report.evaluation import Row
from server_app.report.tables import headline, places_of, scale_of, titled
from strategies.core.facts import HEADLINES
from strategies.method import Job, Outcome
from strategies.run.stage import StageReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PENALTIES = ("lambda", "shrinkage")  # of a head on a frozen backbone
LEFT_OUT = "left_out_error"
LEGEND_MOST = 20  # classes in a legend; more classes have a colour bar


def run_plots(
    report: StageReport,
    rows: Sequence[Row],
    metrics: Sequence[Mapping[str, Any]],
    points: Sequence[Point] = (),
    *,
    classes: Sequence[str] = (),
    metric: str = "accuracy",
    where: str = "held-out examples",
) -> dict[str, Callable[[], Figure | None]]:
    """Return the plots of a run, each as a function that draws it; plots that would show nothing are left out."""
    counts = {u.client: u.label_counts for u in report.job.uploads if u.label_counts is not None}
    known = metric if any(metric in row for row in metrics) else "accuracy"  # rows of earlier versions have no other
    rounds = any("mib_per_client" in row for row in metrics)
    tested = tested_rounds(metrics, known) if rounds else metrics
    curve = [(row["epoch"], row[known]) for row in tested if "epoch" in row and known in row]
    plots: dict[str, Callable[[], Figure | None]] = {}
    if metric in HEADLINES and any(headline(row.as_json(), metric) is not None for row in rows):
        plots[metric] = partial(plot_scores, rows, metric, where)
    if counts:
        plots["labels"] = partial(plot_labels, counts, classes)
    if rows and len(curve) > 1:
        plots["server_curve"] = partial(plot_curve, curve, rows, rounds=rounds, metric=known)
    if differ_in_cost(points):
        plots["communication"] = partial(plot_costs, points, where=where, metric=metric)
    if weights := client_weights(report.outcome):
        plots["client_weights"] = partial(plot_client_weights, weights)
    plots["choice"] = partial(plot_choice, metrics)
    if (images := report.outcome.images) is not None:
        plots["synthetic_images"] = partial(plot_images, images.numpy())
    return plots


def plot_labels(counts: Mapping[str, Sequence[int]], names: Sequence[str] = ()) -> Figure:
    """Draw the number of training examples of each class at every client."""
    classes = len(next(iter(counts.values())))
    figure, axes, _ = row_figure(list(counts), least=0.8 + 0.2 * min(classes, LEGEND_MOST))
    left = np.zeros(len(counts))
    for label, colour in enumerate(_palette(classes)):
        share = np.array([row[label] for row in counts.values()])
        name = f"{label} {short(names[label])}" if names else str(label)
        axes.barh(range(len(counts)), share, left=left, label=name, color=colour)
        left += share
    axes.set(xlim=(0, max(1.0, *left)), xlabel="training examples", title="Labels per client")
    if classes <= LEGEND_MOST:
        legend_beside(axes, title="class")
    else:
        _colour_bar(figure, axes, classes)
    return figure


def plot_scores(rows: Sequence[Row], metric: str = "accuracy", where: str = "held-out examples") -> Figure:
    """Draw the result table: every row's headline score, with its 95 % interval where it is known."""
    figure, axes, points = row_figure([row.name for row in rows])
    values = [headline(row.as_json(), metric) for row in rows]
    digits, scale, farthest = places_of(metric) - 1, scale_of(metric), 1.0 if metric in HEADLINES[:4] else 0.01
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        axes.barh(place, value or 0.0, color=COLOURS[row.kind], label=row.kind)
        score, end = row.scores.get(metric, {}), value or 0.0
        if score.get("low") is not None:
            low, high = scale * score["low"], scale * score["high"]
            axes.plot([low, high], [place, place], color="black", linewidth=1.0)
            end = high
        farthest = max(farthest, end)
        text = "-" if value is None else f"{value:.{digits}f}"
        axes.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", size=points)
    axes.set_xlim(0, 1.1 * farthest)  # space for the number of the longest bar
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= farthest])
    axes.spines["bottom"].set_bounds(0, farthest)
    axes.set_xlabel(titled(metric, where))
    alone = any(row.kind == "client" for row in rows)
    axes.set_title("Every client alone, and together" if alone else "All models on the same examples")
    legend_beside(axes)
    return figure


def client_weights(outcome: Outcome) -> dict[str, float]:
    """Return every client's weight in the resulting ensemble; the weights sum to 1.

    Empty without an ensemble, and for a combiner without a single weight per client.
    """
    spec = outcome.ensemble
    if spec is None or spec.combiner not in ("weighted", "weighted-sum"):
        return {}
    weights = spec.weights["weights"].double()
    # The weights are float32, which has about six digits.
    shares = [round(share, 6) for share in (weights / weights.sum()).tolist()]
    return dict(zip(spec.clients, shares, strict=True))


def plot_client_weights(weights: Mapping[str, float]) -> Figure:
    """Draw every client's weight in the ensemble, with a line at the uniform weight."""
    figure, axes, points = row_figure(list(weights))
    bars = axes.barh(range(len(weights)), list(weights.values()), color=COLOURS["client"])
    # Numbers have a white ground, because the dashed line may run through one.
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=points, bbox=ground)
    uniform = 1 / len(weights)
    axes.axvline(uniform, color=COLOURS["ensemble"], linestyle="--", linewidth=1.2, label=f"uniform, 1/{len(weights)}")
    axes.set(xlim=(0, 1.12 * max([uniform, *weights.values()])), xlabel="weight in the ensemble, of 1")
    axes.set_title("Final weight of every client")
    legend_beside(axes)
    return figure


def plot_curve(
    curve: Sequence[tuple[int, float]], rows: Sequence[Row], *, rounds: bool = False, metric: str = "accuracy"
) -> Figure:
    """Draw the result's score over the server epochs or rounds, with the baselines of the same uploads."""
    own = rows[-1]
    figure, axes = new_figure(8.0, 4.0)
    epochs, scores = zip(*curve, strict=True)
    name = own.name if rounds else "student"
    axes.plot(epochs, scores, color=COLOURS[own.kind], marker=".", label=name, clip_on=False)  # the ends in full
    axes.locator_params(axis="x", integer=True)
    axes.set_xlim(epochs[0], epochs[-1])
    for row in rows:
        score = headline(row.as_json(), metric)
        if row.kind in ("baseline", "ensemble") and row is not own and score is not None:
            # The student's teacher ensemble has the colour of FedENS, so its line is dotted.
            style = ":" if row.name == f"{own.name} ensemble" else "--"
            axes.axhline(score, color=COLOURS[row.kind], linestyle=style, linewidth=1.4, label=row.name)
    axes.set(xlabel="round" if rounds else "server epoch", ylabel=titled(metric, "held-out examples"))
    axes.set_title("Round by round" if rounds else "The server stage")
    legend_beside(axes)
    return figure


def score_plots(job: Job, details: Mapping[str, Any]) -> dict[str, Callable[[], Figure | None]]:
    """Return the plots of the result's own answers: confusion matrix, reliability, recall of each class."""
    plots: dict[str, Callable[[], Figure | None]] = {}
    if "confusion" in details:
        names = [row["class"] for row in details["classes"]]
        plots["confusion"] = partial(plot_confusion, details["confusion"], names)
        if len(names) <= 40:
            counts = [upload.label_counts for upload in job.uploads if upload.label_counts is not None]
            plots["recall"] = partial(plot_recall, details["classes"], counts)
    if "calibration" in details:
        plots["reliability"] = partial(plot_reliability, details["calibration"], details["calibration-error"])
    return plots


def plot_confusion(table: Sequence[Sequence[int]], names: Sequence[str]) -> Figure:
    """Draw a confusion matrix [C][C], each true class as shares of its examples."""
    counts = np.array(table, float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = 2.5 + min(7.0, max(2.0, 0.45 * len(names)))
    figure, axes = new_figure(size + 1.0, size)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    if len(names) <= LEGEND_MOST:
        for row, column in np.ndindex(*counts.shape):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
        shown = [short(name) for name in names]
        axes.set_xticks(range(len(names)), shown, rotation=0 if max(map(len, shown)) < 4 else 60, fontsize="small")
        axes.set_yticks(range(len(names)), shown, fontsize="small")
    axes.set(xlabel="predicted class", ylabel="true class", title="Confusion matrix of the result")
    return figure


def plot_reliability(table: Sequence[Sequence[float]], errors: Mapping[str, float]) -> Figure:
    """Draw the share of correct answers over the confidence, a point per bin, as large as its examples are many."""
    counts, right, confidence = (np.array(row, float) for row in table)
    used = counts > 0
    figure, axes = new_figure(5.5, 4.5)
    axes.plot([0, 1], [0, 1], color=COLOURS["client"], linestyle="--", linewidth=1.2, label="calibrated")
    sizes = 15 + 200 * counts[used] / counts.sum()
    axes.scatter(confidence[used] / counts[used], right[used] / counts[used], s=sizes, color=COLOURS["student"],
                 label="result", clip_on=False)  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="mean confidence of a bin", ylabel="share of correct answers")
    error, calibrated = errors["value"], errors["calibrated"]
    axes.set_title(f"Calibration error {error:.3f}; a calibrated model would show {calibrated:.3f}", fontsize="medium")
    legend_beside(axes)
    return figure


def plot_recall(rows: Sequence[Mapping[str, Any]], counts: Sequence[Sequence[int]]) -> Figure:
    """Draw the recall of each class with its interval, and in its label how many clients held the class."""
    held = [sum(own[place] > 0 for own in counts) for place in range(len(rows))] if counts else []
    names = [row["class"] + (f", {held[place]} clients" if held else "") for place, row in enumerate(rows)]
    figure, axes, _ = row_figure(names)
    known = [(place, row["recall"]) for place, row in enumerate(rows) if row["recall"] is not None]
    places, values = [place for place, _ in known], [100 * recall["value"] for _, recall in known]
    reach = [[100 * abs(recall["value"] - recall[end]) for _, recall in known] for end in ("low", "high")]
    axes.barh(places, values, xerr=reach, color=COLOURS["student"], ecolor=COLOURS["client"], capsize=2)
    axes.set(xlim=(0, 100), xlabel="recall, % (95 % interval)")
    axes.set_title("Recall of every class, and how many clients trained on it" if held else "Recall of every class")
    return figure


def plot_images(images: np.ndarray[Any, Any]) -> Figure:
    """Draw the first 64 of synthetic images [N, ch, H, W], uint8 or pixels in [0, 1], as a grid.

    Of images that are neither grey nor of three colours, the first channel is drawn.
    """
    given = images.shape[1]
    whole = given in (1, 3)
    images = images if whole else images[:, :1]
    shown = images[:64] if images.dtype == np.uint8 else (255 * images[:64]).astype(np.uint8)
    columns = min(16, len(shown))
    count, channels, height, width = shown.shape
    lines = -(-count // columns)
    grid = np.full((channels, lines * (height + 1), columns * (width + 1)), 255, np.uint8)
    for position, image in enumerate(shown):
        top, left = position // columns * (height + 1), position % columns * (width + 1)
        grid[:, top : top + height, left : left + width] = image
    figure, axes = new_figure(8.0, 8.0 * lines / columns + 0.5)
    axes.imshow(grid.transpose(1, 2, 0).squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_axis_off()
    kind = "of the student" if whole else f"(channel 1 of {given})"
    axes.set_title(f"Synthetic training images {kind}; none is a client's")
    return figure


def plot_choice(metrics: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the left-out error over the penalty, and of every client at the chosen one; None where none was left out."""
    curve = [(row[name], row[LEFT_OUT]) for row in metrics for name in PENALTIES if name in row and LEFT_OUT in row]
    clients = [(row["client"], row[LEFT_OUT]) for row in metrics if "client" in row and LEFT_OUT in row]
    if not curve or not clients:
        return None
    figure, over = new_figure(8.0, max(4.0, 1.2 + 0.2 * len(clients)))
    over.remove()
    over, by_client = figure.subplots(1, 2)
    _draw_curve(over, curve, next(name for row in metrics for name in PENALTIES if name in row))
    by_client.barh(range(len(clients)), [error for _, error in clients], color=COLOURS["client"])
    names = [short(name) for name, _ in clients]
    by_client.set_yticks(range(len(clients)), names, fontsize="small")
    by_client.invert_yaxis()
    by_client.set_xlabel("left-out error per example")
    by_client.set_title("Each client under the head of the others")
    return figure


def _draw_curve(axes: Axes, curve: Sequence[tuple[float, float]], name: str) -> None:
    axes.plot(*zip(*curve, strict=True), marker="o", color=COLOURS["student"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(name)
    axes.set_ylabel("left-out error per example")
    axes.set_title("Choice by leaving clients out")


def _colour_bar(figure: Figure, axes: Axes, classes: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    colours = ScalarMappable(BoundaryNorm(np.arange(classes + 1) - 0.5, classes), ListedColormap(_palette(classes)))
    bar = figure.colorbar(colours, ax=axes, label="class", aspect=40, ticks=range(0, classes, -(-classes // 10)))
    bar.minorticks_off()


def _palette(count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab10" if count <= 10 else "turbo"](np.linspace(0, 1, count))
