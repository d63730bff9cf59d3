from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Stage, run_card
from figure_checks import assert_inside_and_apart, drawn
from matplotlib.image import imread
from method_fakes import telling

from server_app.report.card import model_card
from server_app.report.client_scores import (
    chosen_of,
    client_lines,
    client_table,
    confusion_tables,
    evaluation_facts,
    plot_clients,
    summary_line,
)
from server_app.report.communication import Point
from server_app.report.drawing import DPI, save, save_all
from server_app.report.evaluation import Row, result_table
from server_app.report.plots import (
    plot_curve,
    plot_images,
    plot_labels,
    plot_reliability,
    plot_scores,
    run_plots,
)
from server_app.settings.server_data import HeldOut
from strategies.combiners.outcomes import load_model
from strategies.method import Method
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport, keep_outcome
from strategies.scores.exchange import CHOICE, OWN, RESULT, ClientScores, Evaluation
from strategies.scores.sums import Answers

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
    figure = plot_labels(counts(clients)) if plot == "labels" else plot_scores(rows(clients))

    axes = figure.axes[0]
    names = axes.get_yticklabels()
    expected = list(counts(clients)) if plot == "labels" else [row.name for row in rows(clients)]
    assert [name.get_text() for name in names] == expected
    assert_inside_and_apart(figure, names)
    assert_inside_and_apart(figure, [axes.title])
    assert all(name.get_fontsize() >= 7 for name in names)


@pytest.mark.plots
def test_the_score_that_metric_names_is_drawn_with_its_interval() -> None:
    scores = {"auroc": {"value": 0.8, "low": 0.7, "high": 0.9}}
    table = [Row("a", "client", 40.0), Row("FedENS", "ensemble", 60.0, scores)]

    axes = plot_scores(table, "auroc").axes[0]

    assert [bar.get_width() for bar in axes.patches] == [0.0, 80.0]
    assert [list(map(float, each.get_xdata())) for each in axes.lines] == [[70.0, 90.0]]
    assert [text.get_text() for text in axes.texts] == ["-", "80.0"]
    assert axes.get_xlabel() == "AUROC on held-out examples, %"


@pytest.mark.plots
def test_labels_when_stacked_add_up_and_the_legend_names_every_class() -> None:
    figure = plot_labels(counts(5))

    axes = figure.axes[0]
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(10, 5)
    assert widths.T.tolist() == [list(map(float, row)) for row in counts(5).values()]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [str(k) for k in range(10)]
    assert_inside_and_apart(figure, legend.get_texts())
    assert legend.get_window_extent(drawn(figure)).x0 >= axes.get_window_extent().x1


@pytest.mark.plots
def test_the_curve_has_whole_epochs_and_its_legend_beside_it() -> None:
    figure = plot_curve([(1, 20.0), (2, 40.0), (3, 50.0)], rows(2))

    axes, renderer = figure.axes[0], drawn(figure)
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["student", "FedAvg (one shot)", "FedENS"]
    assert legend.get_window_extent(renderer).x0 >= axes.get_window_extent().x1
    assert_inside_and_apart(figure, legend.get_texts())
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


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


@pytest.mark.parametrize("clients", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.plots
def test_the_plots_of_a_run_are_readable_files_of_a_sensible_size(tmp_path: Path, stage: Stage, clients: int) -> None:
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


def card(tmp_path: Path, report: StageReport, method: Method, images: HeldOut) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        digest = keep_outcome(folder, report)
    facts = {"weights_sha256": digest, "options": {"server.epochs": 2}}
    text = model_card(method, report, result_table(report, method.name, images), facts)
    (tmp_path / "run" / "model_card.md").write_text(text)


@pytest.mark.parametrize("method", ["dense", "dw-fedens", "label-count-ensemble", "tally"])
def test_the_load_snippet_of_the_model_card_gives_the_result(tmp_path: Path, stage: Stage, method: str) -> None:
    report, settings, images = stage(method)
    card(tmp_path, report, settings.choice, images)

    loaded = run_card(tmp_path / "run")

    assert ("ensemble" in loaded) is (method == "tally")
    outcomes = {"model": report.outcome, "ensemble": replace(report.outcome, student=None)}
    pixels, _ = next(images.batches(torch.device("cpu")))
    for name in outcomes.keys() & loaded.keys():
        assert not loaded[name].training
        expected = load_model(outcomes[name], report.job)
        with torch.no_grad():
            assert torch.equal(loaded[name](pixels), expected(pixels))


@pytest.mark.plots
@pytest.mark.parametrize(
    ("metric", "own", "result", "gain", "expected"),
    [
        ("accuracy", 0.6, 0.7, (-0.05, 0.25), [55, 85]),
        ("accuracy", 0.9, 0.95, (-0.02, 0.2), [88, 100]),
        ("log-loss", 0.8, 0.5, (0.1, 0.5), [0.7, 0.3]),  # less is better, and a gain is what it has less
    ],
)
def test_a_dumbbell_has_the_interval_of_its_gain_at_the_result(
    metric: str, own: float, result: float, gain: tuple[float, float], expected: list[float]
) -> None:
    row = {"client": "north", "own": {metric: own}, "result": {metric: result}}
    row["gain"] = dict(zip(("low", "high"), gain, strict=True))
    without = {"client": "south", "own": {}, "result": {}, "gain": None}
    figure = plot_clients({"clients": [row, {**row, "gain": None}, without], "metric": metric})
    (axes,) = figure.axes
    (line,) = [line for line in axes.lines if line.get_label() == "95 % interval of the gain"]
    assert list(line.get_xdata()) == pytest.approx(expected)
    assert list(line.get_ydata()) == [0, 0]
    assert [(text.get_text(), text.get_position()[1]) for text in axes.texts] == [("not known", 2)]


def test_a_client_that_cannot_be_compared_is_said_to_be_so() -> None:
    """Three clients: one gains, one has examples of one class, and one has no model of its own."""
    truth = {"north": [0] * 20 + [1] * 20, "south": [1] * 5, "west": [0, 1, 1]}
    clients = []
    for name, labels in truth.items():
        own, result = (
            Answers.of(sign * 4.0 * torch.eye(2)[torch.tensor(labels)], torch.tensor(labels)) for sign in (-1, 1)
        )
        with_own = {} if name == "west" else {OWN: own.sums()}
        pairs = {} if name == "west" else {OWN: own.against(result, 2)}
        clients.append(ClientScores(name, {**with_own, RESULT: result.sums()}, pairs))
    facts = evaluation_facts(Evaluation(tuple(clients), {"east": "no"}), "clients", "auroc", ("healthy", "ill"))
    (table,) = client_table(facts)

    assert [row[2:5:2] for row in table.rows[:3]] == [("0.0", "100.0"), ("-", "-"), ("-", "100.0")]
    assert summary_line(facts) == (
        "Joining helps 1 of 1 clients; the median client gains 100.0 points; 2 more cannot be compared."
    )
    assert any("its examples are all of one class" in note for note in table.notes)
    assert any("mean of clients: each has a scale of its own" in note for note in table.notes)
    matrix = confusion_tables(facts, ("healthy", "ill"), 20)[1]
    assert matrix.rows == [("healthy", "0", "0"), ("ill", "0", "5")]
    (said,) = matrix.notes
    assert said.startswith(
        "Accuracy 100.0 %, 95 % within 56.6 to 100.0; calibration error 0.018, of a calibrated model "
    )
    assert said.endswith(
        "no example is of class healthy: it has no recall and no AUROC, and enters no mean over classes."
    )
    lost = {**facts["clients"][0]["gain"], "value": -0.02, "low": -0.05, "high": 0.01, "verdict": "ties"}
    assert summary_line({**facts, "clients": [{**facts["clients"][0], "gain": lost}]}) == (
        "Joining helps 0 of 1 clients; the median client loses 2.0 points; for 1 the difference may be chance."
    )


@pytest.mark.parametrize(("metric", "chosen"), [("accuracy", "b"), ("log-loss", "a"), ("mae", "")])
def test_a_result_is_chosen_by_scores_of_which_the_better_is_known(metric: str, chosen: str) -> None:
    results = [
        {"run_dir": name, "evaluation": {"metric": metric, "pooled": {CHOICE: {metric: value}}}}
        for name, value in (("a", 0.25), ("b", 0.75))
    ]
    assert chosen_of(results) == chosen


@pytest.mark.parametrize(("metric", "headline"), [("mae", "mae"), ("r2", "r2"), ("accuracy", "mae"), ("mse", "mae")])
def test_scores_of_the_user_s_own_are_headed_by_the_one_that_metric_names(metric: str, headline: str) -> None:
    values = {RESULT: {"mae": 2.5, "r2": 0.75}}
    facts = evaluation_facts(Evaluation((ClientScores("north", {}, values=values, count=5),), {}), "both", metric)

    assert facts["metric"] == headline
    assert client_lines(facts) == [f"north: {headline} on 5 own examples: result {values[RESULT][headline]:.2f}"]


def test_the_log_says_which_clients_share_less_and_what_the_scores_of_all_count() -> None:
    labels = torch.arange(40) % 2
    whole = Answers.of(4.0 * torch.eye(2)[labels], labels).sums(np.arange(40) // 4)
    less = replace(whole, loss=None, calibration=None, histogram=None, within=None, ties=None, groups=None)
    clients = tuple(ClientScores(name, {RESULT: sums}) for name, sums in (("north", whole), ("west", less)))
    lines = client_lines(evaluation_facts(Evaluation(clients, {"east": "no"}), "clients", "auroc", grouped=True))

    assert lines == [
        "north: AUROC on 40 own examples, %: result 100.0",
        "west: AUROC on 40 own examples, %: result -, only accuracy, balanced accuracy and macro F1 are known: nodes "
        "share no more, intervals count examples, not groups, which the answer lacks",
        "AUROC, log loss and calibration error are of 40 of the 80 examples: the other answers hold NaN or Inf, or "
        "their nodes share less",
        "intervals count examples of west, not groups, which the answer lacks",
        "not evaluated: east: no",
    ]


@pytest.mark.plots
def test_a_title_keeps_within_its_figure(tmp_path: Path) -> None:
    figure = plot_reliability([[4, 6], [2, 6], [2.0, 5.5]], {"value": 0.25, "calibrated": 0.1})
    save(tmp_path / "plot.png", figure, "csv · 5 clients")
    assert_inside_and_apart(figure, figure.texts)
    assert "".join(figure.texts[0].get_text().split()) == "Calibrationerror0.250;acalibratedmodelwouldshow0.100"
