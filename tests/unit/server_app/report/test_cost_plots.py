from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from figure_checks import assert_inside_and_apart
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from server_app.compare.report import AMOUNTS, Line, best_of, plot_comparison
from server_app.report.communication import Point, plot_costs
from server_app.report.drawing import COLOURS

pytestmark = pytest.mark.plots


def points(count: int = 12) -> list[Point]:
    kinds = ("baseline", "ensemble", "student")
    return [Point(f"Method {k} of the comparison", kinds[k % 3], 0.25, 40.0 + k / 4) for k in range(count)]


def texts_of(figure: Figure) -> list[str]:
    legend = figure.axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()]


def assert_readable(figure: Figure) -> None:
    figure.canvas.draw()
    axes, renderer = figure.axes[0], figure.canvas.get_renderer()  # type: ignore[attr-defined]
    legend = axes.get_legend()
    assert legend.get_window_extent(renderer).x0 >= axes.get_window_extent().x1
    least, most = axes.get_xlim()
    ticks = [
        label for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if least <= place <= most
    ]
    assert len(ticks) >= 2
    for texts in (legend.get_texts(), ticks, [axes.title], [axes.xaxis.label], [axes.yaxis.label]):
        boxes = [text.get_window_extent(renderer) for text in texts]
        for box in boxes:
            assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert 0 <= box.y0 < box.y1 <= figure.bbox.y1
        for one, other in pairwise(boxes):
            assert not one.overlaps(other)


def test_the_plot_names_every_result_with_the_best_first_and_tells_them_apart() -> None:
    figure = plot_costs(points(), where="all the clients' own examples")

    axes = figure.axes[0]
    assert axes.get_ylabel() == "accuracy on all the clients' own examples, %"
    assert axes.get_xscale() == "log"
    assert texts_of(figure)[0] == "Method 11 of the comparison, 42.8 %"
    assert len(texts_of(figure)) == 12
    looks = [(line.get_marker(), to_hex(line.get_color())) for line in axes.lines if line.get_marker() in set("osD^v")]
    assert len(looks) == len(set(looks)) == 12
    assert {colour for _, colour in looks} == {COLOURS[kind] for kind in ("baseline", "ensemble", "student")}
    assert_readable(figure)


def test_a_log_loss_is_drawn_with_the_least_first() -> None:
    places = [Point("worse", "student", 1.0, 0.81, 0.02), Point("better", "ensemble", 2.0, 0.375)]
    for figure, title in (
        (plot_costs(places, metric="log-loss"), "Log loss against communication"),
        (plot_costs(places, "time", metric="log-loss"), "Log loss against the server's time"),
    ):
        axes = figure.axes[0]
        assert texts_of(figure) == ["better, 0.38 nats", "worse, 0.81 ± 0.02 nats"]
        assert (axes.get_title(), axes.get_ylabel()) == (title, "log loss on held-out examples, nats")
        assert_readable(figure)


def test_rounds_when_drawn_are_a_curve_in_the_colour_of_their_result() -> None:
    curve = ((5.0, 30.0), (6.0, 50.0), (7.0, 55.0))
    figure = plot_costs([*points(2), Point("FENS", "ensemble", 7.0, 56.0, 2.0, (curve, curve[:2]))])

    axes = figure.axes[0]
    drawn = [line for line in axes.lines if line.get_linewidth() == 1.0 and line.get_marker() == "None"]
    places = [np.column_stack([np.asarray(line.get_xdata()), np.asarray(line.get_ydata())]) for line in drawn]
    assert [each.tolist() for each in places] == [np.array(curve).tolist(), np.array(curve[:2]).tolist()]
    assert {to_hex(line.get_color()) for line in drawn} == {COLOURS["ensemble"]}
    assert texts_of(figure)[0] == "FENS, 56.0 ± 2.0 %"
    assert_readable(figure)


def line(name: str, kind: str, *scores: float, metric: str = "accuracy") -> Line:
    other = tuple(100 - score for score in scores)
    accuracies = scores if metric == "accuracy" else other
    return Line(name, "x", kind, len(scores), accuracies, None, dict.fromkeys(AMOUNTS, 1.0), (3, 3), metric, scores)


@pytest.mark.parametrize(("metric", "best", "label"), [
    ("auroc", "B", "AUROC on held-out examples, %"), ("log-loss", "A", "log loss on held-out examples, nats"),
    ("mae", None, "mae on held-out examples"),
])  # fmt: skip
def test_a_comparison_draws_and_ranks_the_score_that_metric_names(metric: str, best: str | None, label: str) -> None:
    lines = [line("A", "student", 0.25, metric=metric), line("B", "ensemble", 0.75, metric=metric)]

    axes = plot_comparison(lines, "Methods").axes[0]

    assert [bar.get_width() for bar in axes.patches] == [0.25, 0.75]
    assert axes.get_xlabel() == label
    found = best_of(lines)
    assert (found and found.name) == best


def test_a_comparison_is_drawn_as_asked_with_spread_single_results_and_the_colours_of_its_kinds() -> None:
    lines = [
        line("DENSE", "student", 60.0, 62.0, 70.0),
        line("FedENS", "ensemble", 61.0),
        line("B", "student", 1.0, 2.0),
    ]

    figure = plot_comparison(lines, "Methods on the same uploads (fashion-mnist): 12 runs, 3 seeds")

    axes = figure.axes[0]
    assert axes.get_title() == "Methods on the same uploads (fashion-mnist): 12 runs, 3 seeds"
    assert [bar.get_width() for bar in axes.patches] == [64.0, 61.0, 1.5]
    assert [name.get_text() for name in axes.get_yticklabels()] == ["DENSE", "FedENS", "B"]
    assert axes.yaxis_inverted()
    assert [text.get_text() for text in axes.texts] == ["64.00 ± 5.29", "61.00", "1.50 ± 0.71"]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [COLOURS[each.kind] for each in lines]
    dots = [dot for dots in axes.collections if isinstance(dots, PathCollection) for dot in dots.get_offsets().tolist()]
    assert dots == [[60.0, 0.0], [62.0, 0.0], [70.0, 0.0], [1.0, 2.0], [2.0, 2.0]]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["student", "ensemble"]
    assert_inside_and_apart(figure, axes.texts)
    assert_inside_and_apart(figure, axes.get_yticklabels())
    assert_inside_and_apart(figure, [axes.title])
    assert_inside_and_apart(figure, [axes.xaxis.label])
