from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

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
