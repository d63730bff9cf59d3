from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figure_checks import assert_inside_and_apart, drawn
from matplotlib.colors import to_hex
from matplotlib.image import imread
from method_fakes import telling

from server_app.report.cost_plots import Point
from server_app.report.drawing import DPI, save, save_all
from server_app.report.evaluation import Row, result_table
from server_app.report.plots import (
    COLOURS,
    client_weights,
    model_card,
    plot_accuracy,
    plot_client_weights,
    plot_curve,
    plot_images,
    plot_labels,
    run_plots,
)
from server_app.settings.held_out import HeldOut
from strategies.combiners.outcomes import load_model
from strategies.core.facts import Normalization
from strategies.method import EnsembleSpec, Method, Outcome
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport, keep_outcome

Stage = Callable[..., Any]
RESULTS = [Row("FedAvg (one shot)", "baseline", 40.0), Row("FedENS", "ensemble", 60.0), Row("DENSE", "student", 61.5)]


def rows(clients: int) -> list[Row]:
    return [Row(f"client-{k:03d}", "client", 100.0 * k / clients) for k in range(clients)] + RESULTS


def counts(clients: int, classes: int = 10) -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    return {f"client-{k:03d}": rng.integers(1, 60, classes).tolist() for k in range(clients)}


@pytest.mark.plots
@pytest.mark.parametrize("clients", [1, 5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plot", ["labels", "accuracy"])
def test_names_when_there_are_few_or_many_clients_can_all_be_read(clients: int, plot: str) -> None:
    figure = plot_labels(counts(clients)) if plot == "labels" else plot_accuracy(rows(clients))

    axes = figure.axes[0]
    names = axes.get_yticklabels()
    expected = list(counts(clients)) if plot == "labels" else [row.name for row in rows(clients)]
    assert [name.get_text() for name in names] == expected
    assert_inside_and_apart(figure, names)
    assert_inside_and_apart(figure, [axes.title])
    assert all(name.get_fontsize() >= 7 for name in names)


@pytest.mark.plots
def test_bars_when_clients_are_many_carry_their_numbers_and_the_first_is_on_top() -> None:
    figure = plot_accuracy(rows(100))

    axes = figure.axes[0]
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [round(row.accuracy, 6) for row in rows(100)]
    assert_inside_and_apart(figure, axes.texts)
    assert axes.yaxis_inverted()


@pytest.mark.plots
@pytest.mark.parametrize("clients", [1, 10, pytest.param(100, marks=pytest.mark.slow)])
def test_weights_of_clients_are_drawn_beside_the_line_of_equal_ones(clients: int) -> None:
    weights = {f"client-{k:03d}": 2 * (k + 1) / clients / (clients + 1) for k in range(clients)}

    figure = plot_client_weights(weights)

    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == list(weights.values())
    (line,) = axes.lines
    assert (list(line.get_xdata()), line.get_linestyle()) == ([1 / clients] * 2, "--")
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [f"uniform, 1/{clients}"]
    assert axes.get_xlim()[1] > max(weights.values())
    assert_inside_and_apart(figure, axes.get_yticklabels())
    assert_inside_and_apart(figure, axes.texts)
    assert legend.get_window_extent(drawn(figure)).x0 >= axes.get_window_extent().x1


def test_weights_of_clients_are_those_of_a_weighted_ensemble_in_sum_1_and_of_no_other_outcome() -> None:
    spec = EnsembleSpec(("a", "b"), "weighted", {"weights": torch.tensor([3.0, 1.0])})

    assert client_weights(Outcome(student={}, ensemble=spec)) == {"a": 0.75, "b": 0.25}
    assert client_weights(Outcome(student={})) == {}
    assert client_weights(Outcome(ensemble=EnsembleSpec(("a",), "mean"))) == {}
    by_class = EnsembleSpec(("a",), "label-count", {"weights": torch.ones(1, 10)})
    assert client_weights(Outcome(ensemble=by_class)) == {}


@pytest.mark.plots
def test_names_when_two_rows_have_the_same_keep_their_own_bars() -> None:
    figure = plot_accuracy([Row("FedENS", "client", 10.0), *RESULTS])

    assert [bar.get_width() for bar in figure.axes[0].patches] == [10.0, 40.0, 60.0, 61.5]
    assert len({bar.get_y() for bar in figure.axes[0].patches}) == 4


@pytest.mark.plots
def test_a_long_name_leaves_room_for_the_bars() -> None:
    figure = plot_accuracy([Row("x" * 64, "client", 10.0), *RESULTS])

    drawn(figure)
    (name, *_), axes = figure.axes[0].get_yticklabels(), figure.axes[0]
    assert len(name.get_text()) == 28
    assert axes.get_window_extent().width > 0.5 * figure.bbox.width
    assert_inside_and_apart(figure, [axes.title])


@pytest.mark.plots
def test_labels_when_stacked_add_up_and_the_legend_names_every_class() -> None:
    figure = plot_labels(counts(5))

    axes = figure.axes[0]
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(10, 5)
    assert widths.T.tolist() == [list(map(float, row)) for row in counts(5).values()]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [str(k) for k in range(10)]
    assert_inside_and_apart(figure, legend.get_texts())
    assert legend.get_window_extent(drawn(figure)).x0 >= axes.get_window_extent().x1


@pytest.mark.plots
def test_labels_of_named_classes_have_their_numbers_and_short_names_in_the_legend() -> None:
    figure = plot_labels(counts(3, classes=2), ["healthy", "a name that is far too long for a legend"])

    legend = figure.axes[0].get_legend()
    assert legend is not None
    healthy, cut = (text.get_text() for text in legend.get_texts())
    assert healthy == "0 healthy"
    assert cut.startswith("1 a name")
    assert "…" in cut
    assert_inside_and_apart(figure, legend.get_texts())


@pytest.mark.plots
def test_labels_when_there_are_a_hundred_classes_are_explained_by_a_colour_bar() -> None:
    figure = plot_labels(counts(3, classes=100))

    drawn(figure)
    assert figure.axes[0].get_legend() is None
    assert len(figure.axes) == 2
    assert figure.axes[1].get_ylabel() == "class"


@pytest.mark.plots
def test_the_curve_has_whole_epochs_and_its_legend_beside_it() -> None:
    figure = plot_curve([(1, 20.0), (2, 40.0), (3, 50.0)], rows(2))

    axes, renderer = figure.axes[0], drawn(figure)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["student", "FedAvg (one shot)", "FedENS"]
    assert legend.get_window_extent(renderer).x0 >= axes.get_window_extent().x1
    assert_inside_and_apart(figure, legend.get_texts())
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.plots
def test_the_curve_of_a_method_with_an_ensemble_of_its_own_tells_it_from_fedens() -> None:
    table = [*RESULTS[:2], Row("Tally ensemble", "ensemble", 70.0), Row("Tally", "student", 65.0)]
    figure = plot_curve([(1, 60.0), (2, 65.0)], table)

    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines) == ["student", "FedAvg (one shot)", "FedENS", "Tally ensemble"]
    looks = {(line.get_linestyle(), to_hex(line.get_color())) for line in lines.values()}
    assert len(looks) == len(lines)


@pytest.mark.plots
def test_the_curve_of_rounds_with_clients_is_its_result_s_own() -> None:
    table = [*rows(2)[:-1], Row("FENS", "ensemble", 90.0)]
    figure = plot_curve([(5, 20.0), (10, 40.0)], table, rounds=True)

    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["FENS", "FedAvg (one shot)", "FedENS"]
    assert to_hex(axes.lines[0].get_color()) == COLOURS["ensemble"]
    assert axes.get_xlabel() == "round"


@pytest.mark.plots
@pytest.mark.parametrize("shape", [(64, 1, 16, 16), (10, 3, 32, 32), (1, 1, 8, 8), (100, 3, 8, 8)])
def test_the_grid_of_images_holds_the_images(shape: tuple[int, int, int, int]) -> None:
    images = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)

    figure = plot_images(images)

    grid = np.asarray(figure.axes[0].images[0].get_array())
    side = shape[2]
    first = grid[:side, :side].reshape(side, side, -1).transpose(2, 0, 1)
    assert np.array_equal(first, images[0])
    if shape[0] > 1:
        second = grid[:side, side + 1 : 2 * side + 1].reshape(side, side, -1).transpose(2, 0, 1)
        assert np.array_equal(second, images[1])


@pytest.mark.plots
@pytest.mark.parametrize("channels", [2, 4])
def test_of_images_that_no_screen_shows_the_first_channel_is_drawn_and_named(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 255, (1, channels, 8, 8), dtype=np.uint8)

    axes = (figure := plot_images(images)).axes[0]

    assert np.array_equal(np.asarray(axes.images[0].get_array())[:8, :8], images[0, 0])
    assert f"(channel 1 of {channels})" in axes.get_title()
    assert_inside_and_apart(figure, [axes.title])


@pytest.mark.plots
def test_a_dollar_in_a_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    figure = plot_labels({"$a_$": [1, 2]}, ["$1k_$2k", "$0-$10k"])

    save(tmp_path / "labels.png", figure, "$_$")

    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert not any(text.get_parse_math() for text in legend.get_texts())


@pytest.mark.parametrize("clients", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.plots
def test_the_plots_of_a_run_when_written_are_readable_files_of_a_sensible_size(
    tmp_path: Path, stage: Stage, clients: int
) -> None:
    report, _, _ = stage("dense")
    few = report.job.uploads[:1]
    uploads = tuple(telling(few[0], client=f"client-{k:03d}") for k in range(clients))
    report = replace(report, job=replace(report.job, uploads=uploads))

    points = [Point(row.name, row.kind, 0.25 * place, row.accuracy) for place, row in enumerate(RESULTS, 1)]
    metrics: list[dict[str, Any]] = [{"epoch": n, "accuracy": 50.0} for n in (1, 2)] + [{"note": "no epoch"}]
    plots = run_plots(report, rows(clients), metrics, points)
    written = save_all(tmp_path / "report", plots, "digits · 5 clients · seed 0", pytest.fail)

    assert written == ["accuracy.png", "labels.png", "server_curve.png", "communication.png", "synthetic_images.png"]
    for name in written:
        height, width = imread(tmp_path / "report" / name).shape[:2]
        assert width == 8 * DPI
        assert 150 <= height <= 3200
        assert (tmp_path / "report" / name).stat().st_size < 500_000


def test_plots_that_show_nothing_are_left_out(tmp_path: Path, stage: Stage) -> None:
    report, _, _ = stage("fedens")
    points = [Point(row.name, row.kind, 0.25, row.accuracy) for row in RESULTS]

    plots = run_plots(report, rows(3), [{"epoch": 1, "accuracy": 50.0}], points)
    written = save_all(tmp_path / "report", plots, "", pytest.fail)

    assert written == ["accuracy.png", "labels.png"]  # one cost for all, and a curve of one epoch


@pytest.mark.plots
def test_head_of_a_plot_says_title_and_setting_above_everything_else(tmp_path: Path) -> None:
    figure = plot_accuracy(rows(3))
    setting = "digits · split dirichlet-classes, alpha 0.3 · 3 clients · seed 0"

    assert save(tmp_path / "a.png", figure, setting) == "a.png"

    title, line = figure.texts
    assert (title.get_text(), line.get_text()) == ("Every client alone, and together", setting)
    assert_inside_and_apart(figure, [title, line])
    assert line.get_window_extent(drawn(figure)).y0 >= figure.axes[0].get_tightbbox().y1
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "client", "baseline", "ensemble", "student",
    ]  # fmt: skip


@pytest.mark.plots
def test_axes_end_where_the_data_end() -> None:
    figure = plot_accuracy([Row("a", "client", 20.0), Row("b", "student", 61.5)])
    assert figure.axes[0].spines["bottom"].get_bounds() == (0, 61.5)
    assert max(figure.axes[0].get_xticks()) <= 61.5
    curve = plot_curve([(1, 20.0), (2, 40.0), (3, 50.0)], rows(2))
    assert curve.axes[0].get_xlim() == (1, 3)
    assert plot_labels({"a": [3, 4], "b": [1, 9]}).axes[0].get_xlim() == (0, 10)


def test_plots_without_data_are_left_out(tmp_path: Path, stage: Stage) -> None:
    report, _, _ = stage("fedens")
    silent = tuple(telling(upload, label_counts=None) for upload in report.job.uploads)

    plots = run_plots(replace(report, job=replace(report.job, uploads=silent)), rows(3), [])
    written = save_all(tmp_path / "report", plots, "", pytest.fail)

    assert written == ["accuracy.png"]
    assert [path.name for path in (tmp_path / "report").iterdir()] == written


def card(tmp_path: Path, report: StageReport, method: Method, images: HeldOut) -> str:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        digest = keep_outcome(folder, report)
    table = result_table(report, method.name, images)
    return model_card(method, report, table, {"weights_sha256": digest, "options": {"dense.epochs": 2}})


@pytest.mark.parametrize("method", ["dense", "fedavg", "fedens", "dw-fedens", "label-count-ensemble", "tally"])
def test_the_load_snippet_of_the_model_card_when_executed_gives_the_result(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    report, settings, images = stage(method)
    text = card(tmp_path, report, settings.method, images)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "snippet.py").write_text(code)
    monkeypatch.chdir(tmp_path / "run")

    loaded = runpy.run_path(str(tmp_path / "snippet.py"))

    assert ("ensemble" in loaded) is (method == "tally")
    outcomes = {"model": report.outcome, "ensemble": replace(report.outcome, student=None)}
    pixels, _ = next(images.batches(torch.device("cpu")))
    for name in outcomes.keys() & loaded.keys():
        assert not loaded[name].training
        expected = load_model(outcomes[name], report.job)
        with torch.no_grad():
            assert torch.equal(loaded[name](pixels), expected(pixels))


def test_the_model_card_names_the_model_its_source_and_its_accuracy(tmp_path: Path, stage: Stage) -> None:
    report, settings, images = stage("dense")

    text = card(tmp_path, report, settings.method, images)

    for part in (
        "# DENSE: one model",
        "from 3 uploads, with DENSE (Zhang et al., NeurIPS 2022)",
        "Architecture: lenet5.",
        "images of shape (1, 16, 16)",
        "mean (0.5,)",
        "logits of 10 classes",
        "Seed: 0",
        "| client-000 | client | ",
        "| DENSE | student | ",
        "- `dense.epochs` = 2",
    ):
        assert part in text
    assert re.search(r"Weights \(sha256\): [0-9a-f]{64}\.", text)


def test_the_model_card_of_images_that_nothing_normalises_says_so(tmp_path: Path, stage: Stage) -> None:
    report, settings, images = stage("fedavg")
    report = replace(report, job=replace(report.job, normalization=Normalization.identity(1)))

    text = card(tmp_path, report, settings.method, images)

    assert "Input: images of shape (1, 16, 16), as the data set gives them, bytes divided by 255. Output" in text


def test_the_model_card_of_a_student_with_an_ensemble_names_both(tmp_path: Path, stage: Stage) -> None:
    report, settings, images = stage("tally", "mnist-cnn", "lenet5", "lenet5")

    text = card(tmp_path, report, settings.method, images)

    assert "# Tally: one model, and an ensemble of 3 models\n" in text
    assert "Architecture: lenet5, mnist-cnn." in text


def test_the_model_card_of_an_ensemble_names_every_architecture(tmp_path: Path, stage: Stage) -> None:
    report, settings, images = stage("fedens", "mnist-cnn", "lenet5", "lenet5")

    text = card(tmp_path, report, settings.method, images)

    assert "# FedENS: an ensemble of 3 models" in text
    assert "Architecture: lenet5, mnist-cnn." in text
