from __future__ import annotations

import html
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import MakeRun, compared, oneshot, replayed
from safetensors.torch import load_file

from fl_app.data import open_split
from fl_app.models import build, builders
from server_app.compare import comparison as running
from server_app.compare.cell import Cell, run_cell
from server_app.compare.comparison import jobs_for, run_cells
from server_app.compare.report import differences_table, lines_of, table_of
from strategies.core.durable import read_json
from strategies.core.errors import OneShotError, OptionError
from strategies.core.facts import HEADLINES
from strategies.core.processor import all_cores
from strategies.core.seeds import seeded_torch
from strategies.method import METHODS, EnsembleSpec, Job, Outcome, Progress
from strategies.run.ensembles import load_ensemble_module
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder
from strategies.scores.sums import Answers
from strategies.scores.values import gain


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DENSE end with a student, drawn by the seed, and with an ensemble that weighs its clients."""

    def fit(job: Job, progress: Progress) -> Outcome:
        with seeded_torch(job.seed, "student"):
            student = dict(build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict())
        progress.record({"epoch": 1, "accuracy": 90.0 + job.seed, "log-loss": 0.25 + job.seed / 10})
        names = tuple(upload.client for upload in job.uploads)
        return Outcome(student, EnsembleSpec(names, "weighted", {"weights": torch.arange(1.0, len(names) + 1)}))

    monkeypatch.setattr("strategies.methods.dense.METHOD", replace(METHODS["dense"], fit=fit))


def rows_of(comparison: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in comparison["table"]}


@pytest.mark.usefixtures("both")
def test_methods_when_compared_have_a_line_per_outcome_with_mean_and_sample_deviation(
    run_folder: MakeRun, ran: list[Any], tmp_path: Path
) -> None:
    run = run_folder(seed=3)

    found = compared(run, methods="dense,fedavg", seeds=3, out=tmp_path / "out")

    # What draws nothing has one cell; every method comes once before the next seed.
    assert ran == [("dense", "run", 3), ("fedavg", "run", 3), ("dense", "run", 4), ("dense", "run", 5)]
    lines = rows_of(found)
    assert list(lines) == ["DENSE ensemble", "DENSE (2 epochs of 200)", "FedAvg (one shot)"]
    assert [line["kind"] for line in lines.values()] == ["ensemble", "student", "baseline"]
    assert [line["results"] for line in lines.values()] == [3, 3, 1]
    scores = [
        read_json(Path(cell["run_dir"]) / "result.json")["accuracy"]
        for cell in found["cells"]
        if cell["method"] == "dense"
    ]
    assert lines["DENSE (2 epochs of 200)"]["accuracy"] == pytest.approx(sum(scores) / 3, abs=0.01)
    assert lines["DENSE (2 epochs of 200)"]["accuracy_spread"] == pytest.approx(statistics.stdev(scores), abs=0.01)
    assert lines["DENSE (2 epochs of 200)"]["accuracy_spread"] > 0.0
    assert lines["DENSE ensemble"]["accuracy_spread"] == 0.0  # the same ensemble each time
    assert lines["FedAvg (one shot)"]["accuracy_spread"] is None
    assert [line["best_accuracy"] for line in lines.values()] == [None, 94.0, None]  # of 93, 94 and 95
    assert {line["uploads"] for line in lines.values()} == {"3"}


@pytest.mark.usefixtures("both", "ran")
def test_the_best_epoch_is_the_best_by_the_score_that_metric_names(run_folder: MakeRun, tmp_path: Path) -> None:
    found = compared(run_folder(metric="log-loss"), methods="dense", seeds=2, out=tmp_path / "out")

    ensemble, student = found["table"]
    assert (student["best_accuracy"], student["best_score"]) == (90.5, 0.3)  # the least loss of each seed: 0.25, 0.35
    assert (ensemble["best_accuracy"], ensemble["best_score"]) == (None, None)
    table = table_of(found, lines_of(found["cells"]))
    assert [row[table.columns.index("best, nats")] for row in table.rows] == ["-", "0.300"]
    page = (Path(found["cells"][0]["run_dir"]) / "report.html").read_text()
    assert "0.250 nats, chosen on the held-out examples themselves" in page


@pytest.mark.usefixtures("both", "ran")
def test_every_line_is_compared_with_the_best_one_on_the_same_examples(run_folder: MakeRun, tmp_path: Path) -> None:
    run = run_folder()

    found = compared(run, methods="fedens,fedavg,dense", seeds=2, out=tmp_path / "out")

    [cells] = (tmp_path / "out" / "cells").iterdir()
    average = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).eval()
    average.load_state_dict(load_file(cells / "fedavg-seed0" / "student.safetensors"))
    makes = builders(10, (1, 16, 16))
    models = {
        "FedENS": load_ensemble_module(cells / "fedens-seed0" / "ensemble", makes),
        "DENSE ensemble": load_ensemble_module(cells / "dense-seed0" / "ensemble", makes),
        "FedAvg (one shot)": average,
    }
    split = open_split("digits", "test", image_size=16)
    data = split.take(torch.arange(len(split.labels)))
    pixels, count = (data.images / 255 - 0.5) / 0.5, len(split.labels)
    right = {name: model(pixels).argmax(1) == data.labels for name, model in models.items()}
    best = max(right, key=lambda name: int(right[name].sum()))
    lines = rows_of(found)
    assert lines[best]["to_best"] is None
    for name in right.keys() - {best}:
        gained, lost = int((right[name] & ~right[best]).sum()), int((~right[name] & right[best]).sum())
        up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)  # Bonett and Price (2012)
        half = 1.959964 * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
        wanted = {"value": (gained - lost) / count, "low": up - down - half, "high": up - down + half}
        assert lines[name]["to_best"] == pytest.approx(wanted, abs=1e-5)
    student = lines["DENSE (2 epochs of 200)"]  # of two seeds
    assert student["to_best"]["value"] == pytest.approx((student["accuracy"] - lines[best]["accuracy"]) / 100, abs=2e-4)
    shown = table_of(found, lines_of(found["cells"]))
    place = shown.columns.index("to the best, points")
    text = {row[0]: row[place] for row in shown.rows}
    assert text[best] == "-"
    assert all(("tie" in text[name]) == (row["to_best"]["high"] >= 0) for name, row in lines.items() if row["to_best"])

    by_loss = run_folder(name="scored", metric="log-loss")
    scored = compared(by_loss, methods="fedens,fedavg", out=tmp_path / "scored")
    results = [read_json(Path(cell["run_dir"]) / "result.json") for cell in scored["cells"]]
    losses = [result["scores"]["log-loss"]["value"] for result in results]
    assert [line["score"] for line in scored["table"]] == pytest.approx(losses, abs=5e-4)
    table = table_of(scored, lines_of(scored["cells"]))
    assert [row[table.columns.index("log loss, nats")] for row in table.rows] == [f"{loss:.3f}" for loss in losses]
    names = ["FedENS", "FedAvg (one shot)"]
    best, worse = names if losses[0] < losses[1] else names[::-1]
    assert scored["best"] == {"name": best, "metric": "log-loss"}
    with torch.no_grad():
        before, after = (Answers.of(models[name](pixels), data.labels) for name in (best, worse))
    pair = before.against(after, 10)
    for name in HEADLINES:
        score, wanted = scored["differences"][worse][name], gain(before.sums(), after.sums(), pair, name)
        assert wanted is not None
        ends = ("value",) if name == "macro-f1" else ("value", "low", "high")  # sums do not compare it by example
        assert [score[end] for end in ends] == pytest.approx([getattr(wanted, end) for end in ends], abs=1e-5), name
    assert scored["table"][names.index(worse)]["to_best"] == scored["differences"][worse]["log-loss"]
    assert table.rows[names.index(worse)][table.columns.index("to the best, nats")].startswith("-")
    (by_score,) = differences_table(scored)
    assert (by_score.heading, [row[0] for row in by_score.rows]) == (f"Compared with {best}", [worse])
    points = [f"{name}, points" for name in ("accuracy", "balanced accuracy", "macro F1", "AUROC")]
    assert by_score.columns == ["method", *points, "log loss, nats"]

    for cell in scored["cells"]:  # as earlier versions wrote them
        file = Path(cell["run_dir"]) / "answers.json"
        stored = read_json(file)
        old = {key: stored[key] for key in ("examples", "examples-sha256")}
        write_json(file, {**old, "right": {name: each["accuracy"] for name, each in stored["effects"].items()}})
    earlier = compared(by_loss, methods="fedens,fedavg", out=tmp_path / "scored")
    assert earlier["best"]["metric"] == "accuracy"
    assert {line: list(scores) for line, scores in earlier["differences"].items()} == {
        name: ["accuracy"] for name in names if name != earlier["best"]["name"]
    }
    assert "Some results lack their log loss by example" in " ".join(
        table_of(earlier, lines_of(earlier["cells"])).notes
    )

    by_class = compared(
        run_folder(name="balanced", metric="balanced-accuracy"), methods="fedens,fedavg", out=tmp_path / "balanced"
    )
    assert by_class["best"]["metric"] == "balanced-accuracy"
    assert {name: scores["balanced-accuracy"] for name, scores in by_class["differences"].items()} == by_class[
        "to_best"
    ]

    other = run_folder(name="other", **{"data.image-size": 16, "data.held-out": "report"})
    apart = compared(run, other, methods="fedens,fedavg", out=tmp_path / "apart")
    assert [row["to_best"] for row in apart["table"]] == [None, None]  # other examples


@pytest.mark.usefixtures("both", "ran")
@pytest.mark.plots
@pytest.mark.slow
def test_every_cell_is_a_replay_folder_and_compare_json_holds_all_of_them(run_folder: MakeRun, tmp_path: Path) -> None:
    run = run_folder()

    found = compared(run, methods="fedens,dense", seeds=2, overrides={"server.epochs": 1})

    folder = Path(found["compare_dir"])
    assert folder.parent == run.parent
    assert read_json(folder / "compare.json") == json.loads(json.dumps(found))
    assert (found["status"], found["data"], found["runs"]) == ("finished", "digits", [str(run)])
    drawn = [found[key] for key in ("plot", "cost_plot") if found[key]]
    assert drawn[0] == "comparison.png"
    assert all((folder / plot).stat().st_size > 1000 for plot in drawn)
    assert found["communication_plot"] == ""  # all cost the same uploads
    page = html.unescape((folder / found["page"]).read_text())
    assert "digits · split dirichlet-classes, alpha 0.3 · 3 clients · seeds 0 / 1" in page
    for line in found["table"]:
        assert f"<td>{line['name']}</td><td>{line['kind']}</td>" in page
    assert page.count("data:image/png;base64,") == len(drawn)
    assert found["command"].replace("--seeds 2", "--seeds 4") in page
    best = max(found["table"], key=lambda row: row["accuracy"])["method"]
    assert f"oneshot replay {run} --method {best} --set server.epochs=1\n" in page.replace("</pre>", "\n")
    assert [(cell["method"], cell["seed"]) for cell in found["cells"]] == [("fedens", 0), ("dense", 0), ("dense", 1)]
    for cell in found["cells"]:
        with RunFolder.open(Path(cell["run_dir"]), write=False) as replay:
            info, result = replay.info, replay.result()
        assert (info["replay-of"], info["method"], info["seed"]) == (str(run), cell["method"], cell["seed"])
        assert info["settings"]["server.epochs"] == (1 if cell["method"] == "dense" else 2)
        assert result["weights_sha256"] == cell["weights_sha256"]
        assert cell["server_s"] >= 0.0
        assert cell["peak_mib"] > 50.0
    plain = replayed(run, "dense", server__epochs=1, seed=1)
    assert plain["weights_sha256"] == found["cells"][2]["weights_sha256"]


@pytest.mark.usefixtures("both")
def test_a_finished_comparison_does_no_work_and_further_methods_join_its_table_under_its_settings_alone(
    run_folder: MakeRun, ran: list[Any], tmp_path: Path
) -> None:
    run, out = run_folder(), tmp_path / "out"
    first = compared(run, methods="fedens,dense", out=out, overrides={"server.pool-cap": 5})
    assert compared(run, methods="fedens,dense", out=out, overrides={"server.pool-cap": 5}) == first
    assert ran == [("fedens", "run", 0), ("dense", "run", 0)]

    words = ["compare", run, "--methods", "dense,fedavg", "--seeds", "2", "--out", out, "--format", "csv", "--set"]
    ended = oneshot(*words, "server.pool-cap=5")
    refused = oneshot(*words, "server.pool-cap=6")

    assert ran[2:] == [("fedavg", "run", 0), ("dense", "run", 1)]
    assert {line.split(",")[0] for line in ended.stdout.splitlines()[1:]} == {"fedens", "dense", "fedavg"}
    cells = {
        (cell["method"], cell["seed"]): cell["weights_sha256"] for cell in read_json(out / "compare.json")["cells"]
    }
    assert cells.items() > {(cell["method"], 0): cell["weights_sha256"] for cell in first["cells"]}.items()
    assert refused.exit_code == 1
    assert "compares with server.pool-cap=5, now it is 6: must be its original settings" in refused.output


@pytest.mark.parametrize(
    ("how", "facts", "message"),
    [
        ({"methods": "fedens,fedprox"}, {}, "unknown method 'fedprox': known are"),
        ({"methods": "fedens,dense,fedens"}, {}, "--methods names 'fedens' twice: must name each method once"),
        ({"methods": " , "}, {}, "--methods is ' , ': must name methods, or be 'all' alone"),
        ({"methods": "all,dense"}, {}, "--methods is 'all,dense': must name methods, or be 'all' alone"),
        ({"overrides": {"method": "dense"}}, {}, "setting 'method' is 'dense': name the methods by --methods"),
        ({"overrides": {"seed": "x"}}, {}, "setting 'seed' is 'x': must be a whole number at least 0"),
        ({"overrides": {"seed": -1}}, {}, "setting 'seed' is -1: must be"),
        ({"methods": "dense", "overrides": {"server.epochs": 0}}, {}, "'server.epochs' is 0"),
        ({"methods": "all", "overrides": {"server.epochs": 0}}, {}, "'server.epochs' is 0"),
        # Another run that is not alike.
        ({}, {"num-classes": 11}, "has number of classes 11, .* has 10: all runs must have the same"),
        ({}, {"input-shape": [1, 32, 32]}, r"has input shape \[1, 32, 32\], .* has \[1, 16, 16\]"),
        ({}, {"settings": {"data.name": "mnist"}}, "has data set 'mnist', .* has 'digits'"),
        ({}, {"settings": None}, "has data set None, .* has 'digits'"),
    ],
)
def test_what_cannot_be_compared_is_one_line_before_anything_starts(
    run_folder: MakeRun, ran: list[Any], how: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    run, other = run_folder(), run_folder(name="other")
    write_json(other / "run.json", {**read_json(other / "run.json"), **facts})

    with pytest.raises(OptionError, match=message):
        compared(run, other, **how)

    assert {*run.parent.iterdir()} == {run, other}
    assert ran == []


@pytest.mark.usefixtures("ran")
def test_runs_whose_clients_differ_are_compared_with_a_warning_that_names_the_differences(run_folder: MakeRun) -> None:
    first = run_folder(seed=3, name="one", **{"data.alpha": 0.1, "data.root": "/a"})
    second = run_folder(seed=4, name="two", **{"data.alpha": 0.3, "data.root": "/b", "method": "dense", "threads": 2})
    lines: list[str] = []

    apart, alike = compared(first, second, log=lines.append), compared(first)

    said = "The runs differ in data.alpha (0.1, 0.3): a mean over them is not one over repetitions"
    assert apart["differing"] == {"data.alpha": [0.1, 0.3]}
    assert lines.count(f"note: {said}") == 1
    assert f"{said}." in table_of(apart, []).notes
    assert alike["differing"] == {}
    assert not any("differ" in note for note in table_of(alike, []).notes)


def test_ctrl_c_says_how_to_go_on_and_that_command_does_the_rest(
    run_folder: MakeRun, ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, here = run_folder(), vars(running)["run_cell"]

    def interrupted(cell: Cell, token: str, log: Callable[[str], None]) -> str:
        if cell.method == "dw-fedens":
            raise KeyboardInterrupt
        return str(here(cell, token, log))

    monkeypatch.setattr(running, "run_cell", interrupted)
    overrides = {"tally.calibrated": True, "server.epochs": 1}
    with pytest.raises(KeyboardInterrupt) as stopped:
        compared(run, methods="fedens,dw-fedens", overrides=overrides, out=tmp_path / "out")
    unfinished = read_json(tmp_path / "out" / "compare.json")["status"]
    monkeypatch.setattr(running, "run_cell", here)
    ran.clear()

    command = str(stopped.value).removeprefix("interrupted. To resume: oneshot ")
    ended = oneshot(*command.split(), "--format", "json")

    assert unfinished == "unfinished"
    assert ended.exit_code == 0, ended.output
    assert ran == [("dw-fedens", "run", 0)]
    result = json.loads(ended.stdout)
    assert [cell["method"] for cell in result["cells"]] == ["fedens", "dw-fedens"]
    assert result["settings"] == overrides


def test_a_cell_that_fails_is_reported_and_the_others_are_in_the_table(
    run_folder: MakeRun, ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, here = run_folder(), vars(running)["run_cell"]
    words = ["compare", run, "--methods", "fedens,fedavg", "--out", tmp_path / "out", "--format", "json"]
    monkeypatch.setattr(
        running, "run_cell", lambda cell, *rest: "no memory." if cell.method == "fedens" else here(cell, *rest)
    )

    ended = oneshot(*words)
    monkeypatch.setattr(running, "run_cell", here)
    ran.clear()
    better = oneshot(*words)

    assert ended.exit_code == 1
    result = json.loads(ended.stdout)
    assert result["status"] == "failed"
    assert result["error"].startswith("a cell failed: fedens, seed 0, run: no memory. To resume: oneshot compare ")
    assert ended.stderr.endswith(f"error: {result['error']}\n")
    assert [row["method"] for row in result["table"]] == ["fedavg"]
    assert better.exit_code == 0
    assert ran == [("fedens", "run", 0)]
    assert "error" not in json.loads(better.stdout)


# In processes of their own.

ENTRY = "from server_app.__main__ import main; main()"


def start(*words: str | Path) -> subprocess.Popen[str]:
    command, env = [sys.executable, "-c", ENTRY, *map(str, words)], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait_for(ready: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None and process.stdout is not None:
            pytest.fail(f"it has ended: {process.stdout.read()}")
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers(folder: Path) -> list[Any]:
    """Return the processes that work on cells, told by where they write."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "server_app.compare.cell" in (process.info["cmdline"] or []):
            try:
                files = [Path(file.path) for file in process.open_files()]
            except psutil.Error:
                continue
            if any(file.is_relative_to(folder) for file in files):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("wide_generators")  # the cells' own processes have no narrow ones
def test_a_comparison_when_interrupted_or_killed_leaves_no_process_and_goes_on_to_the_same_bits(
    run_folder: MakeRun, tmp_path: Path, plotless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", plotless)
    run, out = run_folder(), tmp_path / "out"
    epochs = ["--set", f"server.epochs=8 checkpoint-s=0 threads={all_cores()}"]  # so the cells take turns
    words: list[str | Path] = ["compare", run, "--methods", "fedens,dense", *epochs, "--out", out]

    def steps() -> int:
        files = list(out.rglob("dense-seed0/usage.jsonl"))
        return len(files[0].read_text().splitlines()) if files else 0

    first = start(*words)
    wait_for(lambda: steps() >= 2, first)
    (cell,) = workers(out)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert said.splitlines()[-1].startswith(f"interrupted. To resume: oneshot compare {run} --methods fedens,dense ")
    assert not cell.is_running()

    done = steps()
    second = start(*words)
    wait_for(lambda: steps() >= done + 2, second)
    (cell,) = workers(out)
    second.kill()
    second.communicate(timeout=60)
    _, alive = psutil.wait_procs([cell], timeout=20)
    assert alive == []

    last = start(*words, "--format", "json")
    said, _ = last.communicate(timeout=300)
    assert last.returncode == 0, said
    result = json.loads(said.splitlines()[-1])
    assert [cell["resumed_at"] > 0 for cell in result["cells"]] == [False, True]
    assert "1 cell has finished before" in said
    whole = replayed(run, "dense", server__epochs=8, threads=all_cores())
    assert result["cells"][1]["weights_sha256"] == whole["weights_sha256"]
    assert result["table"][1]["accuracy"] == whole["accuracy"]


@pytest.mark.slow
def test_a_cell_that_is_refused_or_dies_says_why(run_folder: MakeRun, tmp_path: Path) -> None:
    refused = Cell(run_folder(), "dense", 0, tmp_path / "cell", {"server.epochs": 0})
    lines: list[str] = []

    assert "'server.epochs' is 0" in run_cell(refused, "0" * 32, lines.append)
    assert lines == []
    assert not (tmp_path / "cell").exists()

    slow = replace(refused, overrides={"server.epochs": 100_000})

    def kill(line: str) -> None:
        if line.startswith("dense: epoch"):
            for child in psutil.Process().children():
                if "server_app.compare.cell" in child.cmdline():
                    child.kill()

    assert "was killed (signal 9)" in run_cell(slow, "0" * 32, kill)

    def broken(line: str) -> None:
        raise OneShotError("a refusal")

    with pytest.raises(OneShotError, match="a refusal"):
        run_cell(slow, "0" * 32, broken)
    assert [child for child in psutil.Process().children() if "server_app.compare.cell" in child.cmdline()] == []


def cells(folder: Path, *methods: str, settings: Mapping[str, Any] | None = None, **changes: Any) -> list[Cell]:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    # The number of threads that the run had on its own machine is not that of its replays.
    write_json(run / "run.json", {"id": "0" * 32, "threads": 1, "seed": 0, "settings": settings})
    return [Cell(run, method, 0, folder / method, changes) for method in methods]


@pytest.mark.parametrize(("cores", "threads", "wanted"), [(8, 1, 3), (8, 4, 2), (2, 2, 1), (2, 8, 1), (4, 0, 3)])
def test_a_cell_takes_a_core_for_each_of_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, wanted: int
) -> None:
    monkeypatch.setattr(running, "all_cores", lambda: cores)
    methods, cpu = ("fedens", "tally", "dense"), {"device": "cpu"}

    assert jobs_for(cells(tmp_path, *methods, settings={**cpu, "threads": threads})) == wanted
    assert jobs_for(cells(tmp_path, *methods, settings={**cpu, "threads": 1}, threads=threads)) == wanted
    assert jobs_for(cells(tmp_path, *methods)) == min(3, cores)  # of another project, whose cells adapt to the load


def test_cells_run_at_once_and_failures_have_their_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, lines = threading.Barrier(2, timeout=10), list[str]()

    def here(cell: Cell, token: str, log: Callable[[str], None]) -> str:
        both.wait()  # passes only while two cells run
        log("at work")
        return "no memory" if cell.method == "dense" else ""

    monkeypatch.setattr(running, "run_cell", here)
    monkeypatch.setattr(running, "guarded", lambda: nullcontext((Path(), "")))

    assert run_cells(cells(tmp_path, "fedens", "dense"), 2, lines.append) == [("dense, seed 0, run", "no memory")]
    assert {"fedens, run: at work", "dense, run: at work"} <= {*lines}


def test_an_interrupt_starts_no_further_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def stop(cell: Cell, token: str, log: Callable[[str], None]) -> str:
        begun.append(cell.method)
        if len(begun) > 1:  # it has begun before the pool was told to stop: those after it have not
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_cell", stop)
    monkeypatch.setattr(running, "guarded", lambda: nullcontext((Path(), "")))
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells(tmp_path, *(f"m{k}" for k in range(200))), 1, lambda _: None)

    assert len(begun) < 200
