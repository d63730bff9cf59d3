"""A whole run whose server has no examples: three hospitals score the result on their own, and a fourth refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "docs/examples/hospitals/tables"


def test_each_hospital_sees_its_own_gain_and_one_that_refuses_breaks_nothing(
    tmp_path: Path, plotless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    (tmp_path / "server").mkdir()
    shutil.copy(TABLES / "schema.toml", tmp_path / "server")
    for name, rows, more in (
        ("east", "north", "may-evaluate = false"),
        ("north", "north", ""),
        ("south", "south", 'share = "confusion"'),
        ("west", "west", ""),
    ):
        place = tmp_path / name
        place.mkdir()
        shutil.copy(TABLES / "schema.toml", place)
        shutil.copy(TABLES / "train" / f"{rows}.csv", place / "train.csv")
        (nodes / f"{name}.toml").write_text(
            f'client = "{name}"\ndata-root = "{place}"\nstate-dir = "{tmp_path / name / "state"}"\n{more}\n'
        )
    settings = (
        f"method=fens fens.rounds=3 data.name=csv data.label=outcome data.root={tmp_path / 'server'} "
        f"data.partition=domains model.name=logistic client.epochs=5 client.lr=0.1 client.test-share=0.25 "
        f"client.nodes={nodes} run-dir={tmp_path / 'run'} metric=balanced-accuracy min-uploads=4"
    )
    command = [sys.executable, "-m", "server_app", "run", "--set", settings, "--local"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    result = json.loads((tmp_path / "run/result.json").read_text())
    found = result["evaluation"]
    clients = {row["client"]: row for row in found["clients"]}
    assert found["on"] == "clients"
    assert set(clients) == {"north", "south", "west"}
    assert [row["client"] for row in found["refused"]] == ["east"]
    assert "may-evaluate" in found["refused"][0]["reason"]
    total = sum(row["examples"] for row in clients.values())
    right = sum(sum(row["confusion"][label][label] for label in range(2)) for row in clients.values())
    assert result["accuracy"] == pytest.approx(100 * right / total, abs=0.01)
    assert found["pooled"]["result"]["accuracy"] == pytest.approx(right / total, abs=1e-6)
    assert "auroc" in clients["north"]["result"]
    assert "auroc" not in clients["south"]["result"]
    for row in clients.values():
        gain = row["gain"]
        assert gain["low"] <= gain["value"] <= gain["high"]
        assert gain["value"] == pytest.approx(
            row["result"]["balanced-accuracy"] - row["own"]["balanced-accuracy"], abs=1e-5
        )
    assert result["classes"] == ["healthy", "ill"]  # which the server has from the schema alone
    page = (tmp_path / "run/report.html").read_text()
    assert all(name in page for name in ("Joining helps", "north: true classes", "Not evaluated: east"))
    assert "clients.png" in result["plots"]

    # The run's own evaluation was one question, and each client keeps its answer.
    assert len(list(tmp_path.glob("*/state/**/evaluation-*/*.safetensors"))) == 3
