from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import check_looks, needs_browser
from commands import MakeRun, compared, oneshot

from server_app.compare.rounds import plot_rounds, report_rounds, table_of
from server_app.settings.read import default_settings
from strategies.core.durable import read_json
from strategies.run.run_folder import RunFolder


@pytest.fixture
def run_of_rounds(tmp_path: Path) -> MakeRun:
    """Return a function that makes a run in rounds from its accuracies; None: a round that was not tested."""

    def make(
        scores: Sequence[float | None],
        *,
        name: str = "run",
        seed: int = 0,
        planned: int = 0,
        title: str = "FedAvg",
        others: Sequence[float] = (),  # of the score that the metric names
        **settings: Any,
    ) -> Path:
        flat = {**default_settings(), "method": "iterative", "seed": seed, **settings}
        flat["iterative.rounds"] = planned or len(scores)
        path = tmp_path / "runs" / name
        info = {
            "method": flat["method"], "seed": seed, "settings": flat, "num-supernodes": 4, "num-classes": 10,
            "input-shape": [1, 16, 16], "normalization": [[0.5], [0.5]], "threads": 1,
        }  # fmt: skip
        refined = flat["iterative.refiner"] != "none"
        with RunFolder.create(path, info) as folder:
            for number, score in enumerate(scores, start=1):
                row: dict[str, Any] = {"epoch": number, "answers": 2, "train-loss": 1.0, "mib_per_client": 0.5 * number}
                took = {"refinement_s": 2.0 + number, "arithmetic_s": float(number)} if refined else {}
                tested = {} if score is None else {"accuracy": score}
                tested |= {flat["metric"]: others[number - 1]} if others else {}
                folder.round(1).record({**row, **took, **tested})
            if not planned:
                folder.write_result(_result(path, flat, scores, title))
        return path

    return make


def _result(path: Path, flat: dict[str, Any], scores: Sequence[float | None], title: str) -> dict[str, Any]:
    ways = {"mib_up_per_client": 0.25 * len(scores), "mib_down_per_client": 0.25 * len(scores)}
    return {
        "status": "finished", "run_dir": str(path), "method": flat["method"], "seed": flat["seed"],
        "accuracy": scores[-1], "best_accuracy": max(score for score in scores if score is not None),
        "table": [{"name": title, "kind": "baseline", "accuracy": scores[-1]}], "uploads": 0,
        "weights_sha256": "0" * 64, "resumed_at": 0, "seconds": {"clients": 9.0, "server": 4.0 + flat["seed"]},
        "communication": {"counted": "messages", "clients": 4, "phases": {"rounds": ways}, "total": ways},
    }  # fmt: skip


def reported(*runs: Path, targets: Sequence[float] = (), out: Path | None = None) -> dict[str, Any]:
    return report_rounds(runs, targets, out)[0]


def test_runs_that_differ_in_their_seed_alone_are_a_line_with_mean_and_sample_deviation(run_of_rounds: MakeRun) -> None:
    curves = [[50.0, 76.0, 74.0, 81.0], [70.0, 74.9, 75.0, 80.0], [75.0, 79.0, 83.0, 82.0]]
    runs = [run_of_rounds(curve, name=f"r{seed}", seed=seed) for seed, curve in enumerate(curves)]

    found = reported(*runs, targets=[75.0, 80.0])

    (line,) = found["table"]
    first = [2, 3, 1]  # by hand: 74 comes after 76, and 75.0 is enough
    assert line["targets"]["75"] == {
        "rounds": 2.0, "rounds_spread": statistics.stdev(first), "reached": 3, "more_than": None,
        "mib_per_client": 1.0,
    }  # fmt: skip
    assert line["targets"]["80"]["rounds"] == pytest.approx((4 + 4 + 3) / 3, abs=0.01)
    assert (line["name"], line["results"], line["rounds"]) == ("FedAvg", 3, 4)
    assert (line["accuracy"], line["accuracy_spread"]) == (81.0, 1.0)
    assert line["best_accuracy"] == pytest.approx((81 + 80 + 83) / 3, abs=0.01)
    assert (line["server_s"], line["refinement_s"], line["arithmetic_s"]) == (5.0, None, None)


def test_a_target_that_some_run_never_reaches_has_no_mean(run_of_rounds: MakeRun) -> None:
    runs = [run_of_rounds(curve, name=f"r{seed}", seed=seed) for seed, curve in enumerate([[60.0, 76.0], [60.0, 70.0]])]

    facts, (line,) = report_rounds(runs, [60.0, 75.0, 90.0])

    assert facts["table"][0]["targets"]["75"] == {
        "rounds": None, "rounds_spread": None, "reached": 1, "more_than": 2, "mib_per_client": None,
    }  # fmt: skip
    assert [each.shown() for each in line.reached] == [
        ("1.0 ± 0.0", "0.5"),
        (">2 (1 of 2)", ">1"),
        (">2 (0 of 2)", ">1"),
    ]


def test_lines_are_named_by_their_relevant_differences(run_of_rounds: MakeRun) -> None:
    prox = {"iterative.strategy": "fedprox"}
    refined = {"iterative.strategy": "scaffold", "iterative.refiner": "dense"}
    runs = [
        run_of_rounds([50.0], name="a", **{"client.lr": 0.1, "server.epochs": 7, "iterative.mu": 0.5}),
        run_of_rounds([51.0], name="b", seed=1, **{"client.lr": 0.1, "device": "cpu", "compute": "in-process"}),
        run_of_rounds([52.0], name="c", **{"client.lr": 0.05}),
        run_of_rounds([53.0], name="d", **{"client.lr": 0.1, "iterative.mu": 0.5}, **prox),
        run_of_rounds([54.0], name="e", **{"client.lr": 0.1, "iterative.mu": 0.25}, **prox),
        run_of_rounds([55.0], name="f", **{"client.lr": 0.1, "server.epochs": 7}, **refined),
        run_of_rounds([56.0], name="g", **{"client.lr": 0.1, "server.epochs": 9}, **refined),
    ]

    found = reported(*runs)

    assert [(line["name"], line["results"]) for line in found["table"]] == [
        ("FedAvg, client.lr=0.1", 2),
        ("FedAvg, client.lr=0.05", 1),
        ("FedProx, client.lr=0.1, iterative.mu=0.5", 1),
        ("FedProx, client.lr=0.1, iterative.mu=0.25", 1),
        ("DENSE over SCAFFOLD, client.lr=0.1, server.epochs=7", 1),
        ("DENSE over SCAFFOLD, client.lr=0.1, server.epochs=9", 1),
    ]


@pytest.mark.parametrize(
    ("curves", "wanted"),
    [
        ([[60.0, 83.0], [60.0, 80.5]], [75.0, 80.0]),
        ([[60.0, 80.0], [60.0, 79.9]], [70.0, 75.0]),  # the second run does not reach 80
        ([[3.0, 7.0], [2.0, 6.0]], [5.0]),
        ([[3.0, 4.0], [2.0, 6.0]], []),
    ],
)
def test_default_targets_are_multiples_of_five_that_all_runs_of_a_setting_reach(
    run_of_rounds: MakeRun, curves: list[list[float]], wanted: list[float]
) -> None:
    runs = [run_of_rounds(curve, name=f"r{seed}", seed=seed) for seed, curve in enumerate(curves)]
    weak = run_of_rounds([1.0, 2.0], name="weak", **{"iterative.strategy": "fedyogi"})

    assert reported(weak, *runs)["targets"] == wanted


@pytest.mark.plots
def test_rounds_are_compared_by_the_score_that_the_runs_recorded(run_of_rounds: MakeRun, tmp_path: Path) -> None:
    runs = [
        run_of_rounds([80.0, 60.0, 70.0], metric="log-loss", others=losses, name=f"r{seed}", seed=seed)
        for seed, losses in enumerate(([0.9, 0.43, 0.5], [0.6, 0.5, 0.4]))
    ]
    worse = run_of_rounds([99.0], metric="log-loss", others=[0.7], name="worse", **{"iterative.strategy": "fedyogi"})

    found, lines = report_rounds([worse, *runs], (), tmp_path / "out")

    assert (found["metric"], found["targets"]) == ("log-loss", [0.5, 0.6])
    line = found["table"][1]
    assert (line["log_loss"], line["best_log_loss"]) == (0.45, 0.415)
    assert "accuracy" not in line
    assert [line["targets"][target]["rounds"] for target in ("0.5", "0.6")] == [2.0, 1.5]
    assert found["runs"][1]["seeds"]["0"]["curve"][1] == [2, 0.43, 1.0]
    table = table_of(found, lines)
    assert table.heading.startswith("Rounds to a log loss on held-out examples (digits)")
    assert table.columns == [
        "setting", "n", "to 0.5 nats", "MiB", "to 0.6 nats", "MiB", "last, nats", "best, nats", "refine, s",
        "server, s",
    ]  # fmt: skip
    page = (tmp_path / "out/report.html").read_text()
    assert "<b>0.450 ± 0.071 nats</b> <span>after the last round, FedAvg" in page  # the least, and not the largest
    assert plot_rounds(lines, []).axes[0].get_ylabel() == "log loss on held-out examples, nats"

    before = run_of_rounds([50.0], metric="log-loss", name="before", seed=7)  # an earlier version recorded accuracies
    other = run_of_rounds([50.0], metric="auroc", others=[60.0], name="other", seed=8)
    for more in (before, other):
        assert reported(*runs, more)["metric"] == "accuracy"
    assert reported(other)["table"][0]["auroc"] == 60.0
    # In an untested round the number is the clients' own.
    theirs = run_of_rounds([50.0, None, 60.0], metric="auroc", others=[55.0, 99.0, 65.0], name="theirs", seed=9)
    assert reported(theirs)["table"][0]["best_auroc"] == 65.0


def test_runs_that_cannot_be_compared_are_refused_in_one_line(run_of_rounds: MakeRun, tmp_path: Path) -> None:
    run = run_of_rounds([50.0])
    same = run_of_rounds([51.0], name="same", device="cpu")
    other = run_of_rounds([52.0], name="other", seed=1, **{"data.name": "mnist"})
    untested = run_of_rounds([None, None], name="untested", planned=9)
    one_shot = run_of_rounds([], name="one-shot", planned=9, method="dense")
    with RunFolder.open(one_shot) as folder:
        folder.round(1).record({"epoch": 1, "accuracy": 50.0})

    for runs, line in {
        (run, same): "have the same settings and the same seed, 0: must be one run per setting and seed",
        (run, other): "has data set 'mnist'",
        (run, run): "is named twice",
        (untested,): "has no accuracy of a round with its clients: must be a run with at least one tested round",
        (run, one_shot): f"{one_shot} has no accuracy of a round with its clients",
        (tmp_path,): "no run folder",
    }.items():
        done = oneshot("rounds", *runs)
        assert done.exit_code == 1
        (error,) = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert line in error


@pytest.mark.plots
def test_the_command_prints_text_json_and_csv_and_writes_a_folder(run_of_rounds: MakeRun, tmp_path: Path) -> None:
    runs = [run_of_rounds([40.0, 60.0 + seed], name=f"r{seed}", seed=seed) for seed in range(2)]
    out = tmp_path / "report"

    text = oneshot("rounds", *runs, "--targets", "50,60.5", "--out", out)
    told = oneshot("rounds", *runs, "--targets", "50,60.5", "--out", out, "--format", "json")
    rows = oneshot("rounds", *runs, "--targets", "50,60.5", "--format", "csv")

    assert text.exit_code == told.exit_code == rows.exit_code == 0, text.output
    lines = text.stdout.splitlines()
    assert lines[0] == "Rounds to an accuracy on held-out examples (digits): 1 setting, 2 runs."
    assert any("to 60.5 %" in line for line in lines)
    assert any("2.0 ± 0.0" in line and ">2 (1 of 2)" in line and "60.50 ± 0.71" in line for line in lines)
    files = {"page": "report.html", "plot": "learning_curves.png", "results": "rounds.json"}
    assert lines[-3:] == [f"{what:<14} {out}/{name}" for what, name in files.items()]
    page = (out / "report.html").read_text()
    assert "digits · split dirichlet-classes, alpha 0.3 · 4 clients · seeds 0 / 1" in page
    assert "<b>60.50 ± 0.71 %</b> <span>after the last round, FedAvg</span>" in page
    assert '<td>FedAvg</td><td class="number">2</td>' in page
    assert page.count("data:image/png;base64,") == 1
    assert f"oneshot rounds {runs[0]} {runs[1]} --targets 50,60.5 --out {out}" in page
    facts = json.loads(told.stdout)
    assert facts == read_json(out / "rounds.json")
    assert facts["runs"][0]["seeds"]["1"]["curve"] == [[1, 40.0, 0.5], [2, 61.0, 1.0]]
    assert (out / "learning_curves.png").stat().st_size > 5000
    (row,) = csv.DictReader(io.StringIO(rows.stdout))
    assert (row["name"], row["rounds_to_50"], row["reached_to_60.5"], row["rounds_to_60.5"]) == (
        "FedAvg",
        "2.0",
        "1",
        "",
    )


@pytest.mark.slow
@pytest.mark.plots
@needs_browser
def test_page_of_rounds_in_a_browser_shows_its_plot_without_error(run_of_rounds: MakeRun, tmp_path: Path) -> None:
    names = {"iterative.refiner": "co-boosting", "iterative.strategy": "fedadam"}  # a long name, wide columns
    runs = [run_of_rounds([40.0, 60.0 + seed], name=f"r{seed}", seed=seed, **names) for seed in range(2)]

    reported(*runs, targets=[50.0, 60.0, 60.5, 61.0], out=tmp_path / "out")

    check_looks(tmp_path / "out" / "report.html", tmp_path / "browser", images=1)


def test_compare_takes_the_same_runs_and_tells_refiners_apart(run_of_rounds: MakeRun, tmp_path: Path) -> None:
    refined = {"iterative.refiner": "dense"}
    runs = (
        run_of_rounds([50.0, 63.0], name="r3", title="DENSE over FedAvg", **{"server.epochs": 3}, **refined),
        run_of_rounds([50.0, 64.0], name="r4", title="DENSE over FedAvg", **{"server.epochs": 4}, **refined),
        run_of_rounds([50.0, 65.0], name="plain", **{"server.epochs": 9}),
        run_of_rounds([50.0, 66.0], name="again", seed=1),
    )

    found = compared(*runs, out=tmp_path / "out")

    assert [(row["name"], row["accuracy"]) for row in found["table"]] == [
        ("DENSE over FedAvg, 3, as run", 63.0),
        ("DENSE over FedAvg, 4, as run", 64.0),
        ("FedAvg, as run", 65.5),
    ]
