from __future__ import annotations

import pytest
from figure_checks import assert_inside_and_apart
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex

from server_app.compare.report import AMOUNTS, Line, best_of, plot_comparison
from server_app.report.drawing import COLOURS

pytestmark = pytest.mark.plots


def line(name: str, kind: str, *scores: float, metric: str = "accuracy") -> Line:
    other = tuple(100 - score for score in scores)
    accuracies = scores if metric == "accuracy" else other
    return Line(name, "x", kind, len(scores), accuracies, None, dict.fromkeys(AMOUNTS, 1.0), (3, 3), metric, scores)


@pytest.mark.parametrize(("metric", "best", "label"), [
    ("auroc", "B", "AUROC on held-out examples, %"), ("log-loss", "A", "log loss on held-out examples, nats"),
])  # fmt: skip
def test_a_comparison_draws_and_ranks_the_score_that_metric_names(metric: str, best: str, label: str) -> None:
    lines = [line("A", "student", 0.25, metric=metric), line("B", "ensemble", 0.75, metric=metric)]

    axes = plot_comparison(lines, "Methods").axes[0]

    assert [bar.get_width() for bar in axes.patches] == [0.25, 0.75]
    assert axes.get_xlabel() == label
    found = best_of(lines)
    assert found.name == best


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
