"""`oneshot run --local`: every method, Ctrl-C and resume, new data in a second run, and a process left as it was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import completed
from commands import oneshot as run_command

from client_app import work
from client_app.evaluating import EvaluatingClient
from server_app.launch.superlink import Scalar
from server_app.report.client_scores import results_table
from server_app.settings.choices import CHOICES
from strategies.client.evaluation import LocalEvaluation
from strategies.method import METHODS, Need

ROOT = Path(__file__).parents[3]
BACKBONE: dict[str, Scalar] = {"features__backbone": "tiny_backbone:make"}  # for methods of sums of features


def kinds() -> list[str]:
    """Return one method for each thing that clients are asked for or a server may need; and federated rounds."""
    first: dict[Any, str] = {}
    for method in METHODS.values():
        plan = method.plan(method.config())
        images = Need.PROXY_IMAGES in method.needs
        first.setdefault((method.uploads, method.client_phase is None, plan.asks, images), method.name)
    return [*first.values(), *sorted(CHOICES.keys() - METHODS.keys())]


@pytest.mark.parametrize("method", kinds())
def test_a_method_of_every_kind_runs_to_a_finished_result(oneshot: Any, method: str) -> None:
    rounds: dict[str, Scalar] = {"iterative__rounds": 2, "fens__rounds": 2}
    status, result, log = oneshot("run", "--method", method, **rounds, **BACKBONE)

    assert status == 0, (result, log)
    assert result["status"] == "finished"
    assert result["refusals"] == []
    assert result["table"]


@pytest.mark.slow
@pytest.mark.usefixtures("ran")
def test_clients_of_a_finished_run_score_its_result_and_those_of_replays(oneshot: Any, tmp_path: Path) -> None:
    place = tmp_path / "run"
    _, result, _ = oneshot("run", "--method", "fedavg", evaluate__on="both", run_dir=str(place))
    compared, _ = completed(oneshot("compare", place, "--methods", "fedens,fedavg", "--on", "clients"))

    assert not compared["own"]  # scores are no part of a result: the replay is the run's own
    replayed = {row["method"]: row for row in compared["results"]}
    assert set(replayed) == {"fedens", "fedavg"}
    scores = {row["run_dir"]: row["evaluation"]["pooled"]["choice"]["accuracy"] for row in replayed.values()}
    assert scores[compared["chosen"]] == max(scores.values())
    rows = results_table(compared["results"]).rows
    assert [row[0].endswith(", chosen") for row in rows] == [place == compared["chosen"] for place in scores]
    folder = Path(compared["compare_dir"])
    assert json.loads((folder / "compare.json").read_bytes())["results"] == compared["results"]
    page = (folder / "report.html").read_text()
    assert "On the clients&#39; own examples" in page
    assert page.count("Joining helps") == 2
    rows = zip(replayed["fedavg"]["evaluation"]["clients"], result["evaluation"]["clients"], strict=True)
    for again, first in rows:  # the other examples choose between the methods
        assert again["examples"] == (first["examples"] + 1) // 2
    cell = Path(replayed["fedens"]["run_dir"])
    kept = (cell / "result.json").read_bytes()
    assert json.loads(kept)["evaluation"]["clients"] == replayed["fedens"]["evaluation"]["clients"]
    assert "Joining helps" in (cell / "report.html").read_text()

    status, repeated, log = oneshot("evaluate", place, "--on", "clients")
    assert status == 0, log  # a question that they have answered before
    assert "own examples" not in log  # the command prints the scores itself, as JSON here
    assert repeated["results"][0]["evaluation"]["clients"] == result["evaluation"]["clients"]
    places = [row["run_dir"] for row in reversed(compared["results"])]
    repeated, _ = completed(oneshot("evaluate", *places, "--on", "clients"))  # the same results in another order
    assert [row["evaluation"] for row in repeated["results"][::-1]] == [
        row["evaluation"] for row in compared["results"]
    ]
    status, failed, _ = oneshot("evaluate", cell, "--on", "clients")
    assert status == 1
    assert "answered 2 evaluations" in failed["error"]
    assert (cell / "result.json").read_bytes() == kept


def test_rounds_record_the_score_that_heads_the_tables(oneshot: Any) -> None:
    result, _ = completed(oneshot("run", "--method", "iterative", metric="auroc", iterative__rounds=2))

    rows = [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["auroc"] == pytest.approx(100 * result["scores"]["auroc"]["value"], abs=1e-3)
    assert rows[-1]["accuracy"] == result["accuracy"]
    found = json.loads(run_command("rounds", result["run_dir"], "--format", "json").stdout)
    assert found["table"][0]["auroc"] == pytest.approx(rows[-1]["auroc"], abs=0.01)


def test_a_client_without_test_examples_is_named_once_and_its_upload_counts(oneshot: Any) -> None:
    """Of three examples each, two clients keep one of another class for a test, and one client none."""
    few: dict[str, Scalar] = {"data__limit": 10, "data__alpha": 0.05}
    result, log = completed(oneshot("run", "--method", "fedens", evaluate__on="clients", metric="auroc", **few))

    assert (result["uploads"], result["refused"], result["refusals"]) == (3, 0, [])
    found = result["evaluation"]
    assert [row["client"] for row in found["clients"]] == ["client-000", "client-001"]
    [missing] = found["refused"]
    assert missing["client"] == "client-002"
    assert "test examples are too few" in missing["reason"]
    assert log.count(missing["reason"]) == 1
    assert "auroc" in found["pooled"]["result"]
    assert "auroc" not in found["pooled"]["own"]  # no client has two classes


def test_an_evaluation_is_refused_where_clients_kept_no_examples(oneshot: Any, tmp_path: Path) -> None:
    place = tmp_path / "run"
    oneshot("run", "--method", "fedavg", evaluate__on="server", run_dir=str(place))
    before = (place / "result.json").read_bytes()
    status, failed, _ = oneshot("evaluate", place, "--on", "clients")

    assert status == 1
    assert "kept no examples for an evaluation" in failed["error"]
    assert (place / "result.json").read_bytes() == before


@pytest.mark.slow
def test_a_run_that_is_interrupted_while_a_client_trains_resumes_to_the_same_bits(
    oneshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = oneshot("run", method="dense", run_dir=str(tmp_path / "whole"))[1]
    prepare, asked = work.prepare_upload, list[str]()

    def noted(config: Any, node: Any, *args: Any) -> Any:
        asked.append(node.client)
        if len(asked) == 2:
            signal.raise_signal(signal.SIGTERM)  # as Ctrl-C
        return prepare(config, node, *args)

    monkeypatch.setattr(work, "prepare_upload", noted)
    run = tmp_path / "runs" / "cut"
    status, _, log = oneshot("run", method="dense", run_dir=str(run))
    assert (status, len(asked)) == (130, 2)
    assert log.splitlines()[-1] == f"interrupted. To resume: oneshot resume {run} --local"
    [row] = json.loads(run_command("list", "--format", "json").stdout)
    assert (row["run"], row["status"]) == ("cut", "unfinished")

    status, result, _ = oneshot("resume", run)
    assert (status, asked[2:]) == (0, ["client-001", "client-002"])
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert result["table"] == whole["table"]
    assert oneshot("resume", run)[1] == result
    assert oneshot("run", method="dense", run_dir=str(run))[0] == 1  # the folder holds a run


@pytest.mark.slow
def test_a_run_that_is_interrupted_while_its_clients_score_resumes_to_the_same_scores(
    oneshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = oneshot("run", method="fedens", evaluate__on="clients", run_dir=str(tmp_path / "whole"))[1]
    side, asked = EvaluatingClient.side, list[int]()

    def noted(client: EvaluatingClient) -> LocalEvaluation:
        asked.append(len(list((tmp_path / "state").glob("**/evaluation-*/*.safetensors"))))
        if len(asked) == 2:
            signal.raise_signal(signal.SIGTERM)
        return side(client)

    monkeypatch.setattr(EvaluatingClient, "side", noted)
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "state"))
    run = tmp_path / "cut"
    assert oneshot("run", method="fedens", evaluate__on="clients", run_dir=str(run))[0] == 130
    assert not (run / "result.json").exists()

    result, _ = completed(oneshot("resume", run))

    assert asked == [0, 1, 1, 1, 2]  # answers kept: the first client repeats its own
    assert result["evaluation"] == whole["evaluation"]
    assert result["table"] == whole["table"]


CODE = """
import numpy as np


def load(split):
    number = int(open("number").read())
    return np.zeros((number, 1, 8, 8), "uint8"), np.arange(number) % 3, *([np.arange(number) % 3] * (split == "train"))
"""


def test_a_second_run_in_the_process_reads_its_data_anew(oneshot: Any, tmp_path: Path) -> None:
    (tmp_path / "own_numbers.py").write_text(CODE)
    own: dict[str, Scalar] = {"data__name": "own_numbers:load", "data__partition": "domains", "data__proxy": 0.0}
    found = []
    try:
        for number in (30, 60):
            (tmp_path / "number").write_text(str(number))
            result, _ = completed(oneshot("run", method="fedavg", **own))
            rows = (Path(result["run_dir"]) / "uploads.jsonl").read_text().splitlines()
            found.append([json.loads(row)["num_examples"] for row in rows])
    finally:
        sys.modules.pop("own_numbers", None)
    assert found == [[10] * 3, [20] * 3]


def test_a_client_that_fails_costs_its_upload_and_a_run_without_a_quorum_ends_in_a_line(
    oneshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: Any, node: Any, *args: Any) -> Any:
        if node.client == "client-001":
            raise ZeroDivisionError("no model")
        return prepare(config, node, *args)

    prepare = work.prepare_upload
    monkeypatch.setattr(work, "prepare_upload", failing)
    status, result, log = oneshot("run", method="fedavg")
    assert (status, result["uploads"], result["refused"]) == (0, 2, 1)
    assert result["refusals"][0]["reason"] == "ZeroDivisionError: no model"
    assert "Traceback" in log

    status, result, log = oneshot("run", method="fedavg", min_uploads=3)
    assert status == 1
    assert result["error"].startswith("the run failed: 2 uploads arrived, min-uploads is 3.")
    assert result["error"].endswith(f"To resume: oneshot resume {result['run_dir']} --local")


def test_a_run_leaves_the_process_as_it_was(oneshot: Any) -> None:
    def state() -> list[object]:
        seeds = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[union-attr]
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return [*seeds, Path.cwd(), list(sys.path), dict(os.environ), signals, torch.get_num_threads()]

    before = state()
    assert oneshot("run", method="fens", fens__rounds=2)[0] == 0
    assert state() == before


@pytest.mark.slow
def test_the_threads_of_a_local_run_take_subnormal_numbers_for_zero() -> None:
    """Those too that load data before the ServerApp begins."""
    code = """
        from pathlib import Path
        from server_app.launch.console import errors
        from server_app.launch.run_command import launch_run, plan_run
        from server_app.launch.superlink import Launched
        import torch

        def probe(*_, **__):
            print(torch.get_num_threads(), int((torch.full((2**20,), 1e-39) * 0.5).count_nonzero()))
            return Launched(1, "finished:failed", "probed")

        torch.set_num_threads(2)
        launch_run(Path(), plan_run({"run-dir": "no-run", "data.name": "digits"}), errors("text"), probe)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["2 0"], done.stderr


def test_an_app_s_folder_and_local_exclude_each_other(oneshot: Any) -> None:
    assert oneshot("run", "somewhere")[1]["error"].startswith("--local runs the installed app")
