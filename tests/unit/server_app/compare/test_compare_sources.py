from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import MakeRun, compared, oneshot

from server_app.compare import comparison as comparing
from server_app.compare.sources import differing, own_results, with_uploads
from server_app.report.communication import Cost
from server_app.settings.choices import CHOICES
from strategies.core.durable import MIB, read_json
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder
from strategies.run.traffic import Traffic

CURVE = [[3.0, 40.0], [4.0, 70.0]]


@pytest.fixture
def run_of_fens(run_folder: MakeRun) -> MakeRun:
    """Return a function that makes a finished run of FENS; without uploads, one that looks like rounds alone."""

    def make(accuracy: float, *, uploads: bool = True, name: str = "fens", **settings: Any) -> Path:
        run = run_folder(method="fens", name=name, **settings)
        if not uploads:
            (run / "uploads.jsonl").unlink()
            (run / "traffic.json").unlink()
        traffic = Traffic.read(run / "traffic.json")
        for client in ("client-000", "client-001", "client-002"):
            traffic.add("aggregator", client, up=MIB, down=3 * MIB)
        traffic.save()
        cost = Cost(traffic).as_json()
        rows = [("client-000", "client", 20.0), ("FedENS", "ensemble", 60.0), ("FENS", "ensemble", accuracy)]
        result = {
            "status": "finished", "run_dir": str(run), "method": "fens", "seed": settings.get("seed", 0),
            "accuracy": accuracy, "best_accuracy": accuracy + 1, "weights_sha256": "0" * 64, "uploads": 3 * uploads,
            "table": [{"name": name, "kind": kind, "accuracy": score} for name, kind, score in rows],
            "communication": cost, "seconds": {"server": 9.0, "total": 12.0}, "resumed_at": 0,
        }  # fmt: skip
        with RunFolder.open(run) as folder:
            for number, (mib, score) in enumerate(CURVE, start=1):
                folder.round(1).record({"epoch": number, "accuracy": score, "mib_per_client": mib})
            folder.write_result(result)
        info = read_json(run / "run.json")
        write_json(run / "run.json", {**info, "threads": 1})
        return run

    return make


def test_a_run_that_went_on_with_its_clients_brings_its_own_result(run_of_fens: MakeRun, run_folder: MakeRun) -> None:
    plain, fens = run_folder(), run_of_fens(90.0)

    (own,) = own_results([plain, fens])

    assert (own["run"], own["method"], own["server_s"], own["threads"]) == (str(fens), "fens", 9.0, 1)
    assert own["outcomes"] == [
        {"name": "FENS, as run", "stored": "FENS", "kind": "ensemble", "accuracy": 90.0, "curve": CURVE}
    ]
    assert own["mib_per_client"] == pytest.approx(4.0 + (1001 + 150) / MIB, abs=2e-6)
    assert with_uploads([plain, fens]) == [plain, fens]


def test_runs_differ_in_scale_and_options_of_the_methods_and_where_they_have_nothing_but_own_results(
    run_folder: MakeRun, run_of_fens: MakeRun
) -> None:
    runs = [
        run_folder(scale=0.02, **{"server.epochs": 4}),
        run_folder(name="other", scale=1.0, **{"server.epochs": 2}),
        run_of_fens(90.0, uploads=False, scale=1.0, **{"data.alpha": 5.0, "server.epochs": 2}),
    ]

    assert differing(runs, ["fedens", "dense"], []) == {
        "data.alpha": [0.3, 5.0], "server.epochs": [4, 2], "scale": [0.02, 1.0]
    }  # fmt: skip
    assert differing(runs, ["dense"], ["data.alpha", "server.epochs"]) == {"scale": [0.02, 1.0]}


@pytest.mark.usefixtures("ran")
def test_a_run_s_own_result_is_compared_with_those_of_its_uploads_example_by_example(
    run_of_fens: MakeRun, run_folder: MakeRun, tmp_path: Path
) -> None:
    """FENS has the answers of FedENS to all but the first five examples, which it alone gets right."""
    run, plain = run_of_fens(90.0), run_folder()
    (cell,) = compared(plain, out=tmp_path / "plain")["cells"]
    stored = read_json(Path(cell["run_dir"]) / "answers.json")
    right = np.unpackbits(np.frombuffer(b64decode(stored["effects"]["FedENS"]["accuracy"]), np.uint8))
    gained = int((right[:5] == 0).sum())
    right[:5] = 1
    answers = {"FENS": {"accuracy": b64encode(np.packbits(right).tobytes()).decode()}}
    write_json(run / "answers.json", {**stored, "effects": answers})

    found = compared(run, out=tmp_path / "out")

    assert gained > 0
    assert found["best"] == {"name": "FENS, as run", "metric": "accuracy"}
    n, wanted = stored["examples"], -gained / stored["examples"]
    middle, squares = -gained / (n + 2), (gained + 2) / (n + 2)  # Bonett and Price, with an example more for each side
    half = 1.959964 * ((squares - middle**2) / (n + 2)) ** 0.5
    apart = found["to_best"]["FedENS"]
    assert apart == pytest.approx({"value": wanted, "low": middle - half, "high": max(wanted, middle + half)}, abs=1e-5)


@pytest.mark.plots
@pytest.mark.slow
def test_a_comparison_puts_methods_on_stored_uploads_and_a_run_s_own_result_side_by_side(
    run_of_fens: MakeRun, ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, rounds = run_of_fens(90.0), run_of_fens(95.0, uploads=False, name="rounds")
    monkeypatch.setattr(comparing, "CHOICES", {name: CHOICES[name] for name in ("fedavg", "fedens", "fens")})

    found = compared(run, rounds, methods="all", out=tmp_path / "out")

    assert ran == [("fedavg", "fens", 0), ("fedens", "fens", 0)]  # nothing can be done with a run of rounds alone
    assert found["left_out"]["fens"].startswith("it trains with its clients after their upload")
    table = {row["name"]: row for row in found["table"]}
    assert list(table) == ["FedAvg (one shot)", "FedENS", "FENS, as run"]
    assert table["FENS, as run"]["accuracy"] == 92.5
    assert table["FENS, as run"]["mib_per_client"] == pytest.approx(4.0 + (1001 + 150) / MIB / 2, abs=2e-6)
    assert table["FedENS"]["mib_per_client"] == pytest.approx((1001 + 150) / MIB, abs=2e-6)
    assert (tmp_path / "out" / found["communication_plot"]).stat().st_size > 1000
    assert read_json(tmp_path / "out" / "compare.json") == json.loads(json.dumps(found))

    ran.clear()
    ended = oneshot(
        "compare", run, rounds, "--methods", "fedens", "--out", tmp_path / "out", "--format", "md"
    )  # fmt: skip

    assert ended.exit_code == 0, ended.output
    assert ran == []
    assert "| FENS, as run | ensemble | 2 | 92.50 ± 3.54 | 93.50 | 9.0 | - | - | 4 | 0-3 |" in ended.stdout
    assert "As run: the runs' own results, with their clients." in ended.stdout
    assert "FENS, as run: fens.batch-size=8." in ended.stdout
