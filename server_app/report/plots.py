"""The model card and the plots of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from server_app.report.communication import Point, differ_in_cost, plot_costs, tested_rounds
from server_app.report.drawing import COLOURS, legend_beside, new_figure, row_figure, short
from server_app.report.evaluation import Row
from server_app.report.gatekeeping import verdict_table
from server_app.report.load_code import features_section, load_code, plot_choice
from server_app.report.tables import Table, headline, headline_cells, places_of, scale_of, titled
from server_app.settings.choices import Choice
from strategies.core.facts import HEADLINES, Normalization, holds_images
from strategies.method import Job, Outcome
from strategies.run.stage import StageReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def as_given(input_shape: tuple[int, int, int], normalization: Normalization | None) -> str:
    """Say how models take examples that nothing normalises; empty where images are normalised.

    Args:
        input_shape: Of one example.
        normalization: Of images; None for rows and texts.
    """
    if not holds_images(input_shape):
        return "as the data set gives them"
    same = normalization == Normalization.identity(input_shape[0])
    return "as the data set gives them, bytes divided by 255" if same else ""


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


def model_card(method: Choice, report: StageReport, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the model card: the weights, their origin, and the code that loads them."""
    outcome, job = report.outcome, report.job
    results = ["one model"] if outcome.student is not None else []
    results += [f"an ensemble of {len(outcome.ensemble.clients)} models"] if outcome.ensemble is not None else []
    own = {job.student} if outcome.student is not None else set()
    own |= {upload.architecture for upload in job.uploads} if outcome.ensemble is not None else set()
    options = "\n".join(f"- `{key}` = {value!r}" for key, value in sorted(facts.get("options", {}).items()))
    notes = "".join(f"{note[0].upper()}{note[1:]}.\n" for note in facts.get("notes", ()))
    verdicts = "".join(f"\n## {table.markdown()}" for table in verdict_table(facts.get("gatekeeper", {})))
    how = f"one-shot federated learning from {len(job.uploads)} uploads" if job.uploads else "rounds of training"
    return f"""# {method.title}: {", and ".join(results)}

Made by {how}, with {method.titled(job.config)} ({method.source}).
Data: {facts.get("setting") or "unknown"}.
Architecture: {", ".join(sorted(own))}.
Input: {_input_of(job)}. Output: logits of {job.num_classes} classes{_names_of(facts.get("classes", ()))}.
Weights (sha256): {facts["weights_sha256"]}. Seed: {job.seed}.

## Scores{f" on {facts.get('where', 'held-out examples')}" if rows else ""}

{_score_table(rows)}
{_intervals(rows)}{features_section(job, own, facts.get("metrics", ()))}{verdicts}
## Load

After `pip install oneshot-fl`, in this folder:

```python
{load_code(report)}
```

## Options

{options}

## Limits

The server never saw a client's data. This model may still contain what a client's model learned from its data.
{"The scores hold for examples like those that they are counted on." if rows else "Nobody knows yet how good it is."}
{notes}"""


def _score_table(rows: Sequence[Row]) -> str:
    """Return the scores of all rows as a table in Markdown; without rows a sentence."""
    if not rows:
        return "None: this result was scored on no examples."
    cells = [[headline_cells(row.as_json(), name)[0] for name in row.scores] for row in rows]
    lines = [(row.name, row.kind, *texts) for row, texts in zip(rows, cells, strict=True)]
    return Table("", ("name", "kind", *map(titled, rows[-1].scores)), lines, texts=2).markdown().strip()


def _intervals(rows: Sequence[Row]) -> str:
    """Return the intervals of the result's scores, its calibration and its notes, as lines of a card."""
    if not rows:
        return ""
    found = [(name, headline_cells(rows[-1].as_json(), name)[1]) for name in rows[-1].scores]
    known = ", ".join(f"{titled(name)} {interval}" for name, interval in found if interval != "-")
    lines = [f"95 % intervals of the result: {known}."] if known else []
    if errors := rows[-1].details.get("calibration-error"):
        lines.append(
            f"Calibration error {errors['value']:.3f}; a calibrated model would show {errors['calibrated']:.3f}."
        )
    lines += [f"{note[0].upper()}{note[1:]}." for note in rows[-1].details.get("notes", ())]
    return "".join(f"\n{line}\n" for line in lines)


def _names_of(classes: Sequence[str]) -> str:
    """Return the classes in the order of the logits; empty if they have no names."""
    return f": {', '.join(f'{number} {name}' for number, name in enumerate(classes))}" if classes else ""


def _input_of(job: Job) -> str:
    if given := as_given(job.input_shape, job.normalization):
        return f"{'images' if holds_images(job.input_shape) else 'examples'} of shape {job.input_shape}, {given}"
    mean, std = job.normalization.mean, job.normalization.std
    return f"""images of shape {job.input_shape} with pixels in [0, 1], normalised with mean {mean} and
standard deviation {std}"""


def _colour_bar(figure: Figure, axes: Axes, classes: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    colours = ScalarMappable(BoundaryNorm(np.arange(classes + 1) - 0.5, classes), ListedColormap(_palette(classes)))
    bar = figure.colorbar(colours, ax=axes, label="class", aspect=40, ticks=range(0, classes, -(-classes // 10)))
    bar.minorticks_off()


def _palette(count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab10" if count <= 10 else "turbo"](np.linspace(0, 1, count))
