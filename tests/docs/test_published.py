"""Clients of 300 epochs and methods on their uploads: the papers' settings, and a measurement that is cut off."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT
from test_conf_files import KINDS, wanted_rows

from server_app.settings.catalogue import merge_settings
from server_app.settings.read import read_settings
from strategies.core.durable import read_json
from strategies.core.options import flatten, parse
from strategies.method import METHODS

BENCH = ROOT / "tests" / "bench"
# Every program of a measurement starts without these packages.
WITHOUT = 'import sys\nsys.modules.update(dict.fromkeys(["flwr", "ray", "cryptography"]))\n'
SMALL = (
    "data.name=digits model.name=lenet5 client.epochs=1 client.batch-size=32 checkpoint-s=0 server.epochs=30 "
    "server.generator-steps=1 server.synthesis-batch-size=8"
)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    return runpy.run_path(str(BENCH / "published.py"))


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.3])
def test_cells_of_cifar10_have_the_settings_of_the_paper_s_table(published: Mapping[str, Any], alpha: float) -> None:
    settings = read_settings(merge_settings(published["CELLS"][f"cifar10-{alpha:g}-0"].settings, KINDS))

    _, paper = next(wanted_rows("coboosting-table1-cifar10"))
    wanted = {**paper, "data.alpha": alpha, "data.held-out": "report", "seed": 0}
    for name in ("dense", "co-boosting"):
        config = parse(METHODS[name].config, settings.flat, name, "co-boosting")
        has = {**flatten(settings.app), **flatten(config, name)}
        assert {key: has[key] for key in wanted if key in has} == {key: wanted[key] for key in wanted if key in has}


def test_a_call_without_names_measures_nothing_that_takes_a_gpu(published: Mapping[str, Any]) -> None:
    names = published["words_of"](["--dir", "here"]).cells.split(",")

    assert len(names) == 25
    assert not [name for name in names if name.startswith("cifar10")]


@pytest.mark.slow
@pytest.mark.check
def test_a_measurement_without_flower_when_killed_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    kept = tmp_path / "kept"

    def call(methods: str) -> subprocess.Popen[str]:
        words = ["--dir", str(kept), "--cells", "cifar10-0.1-0", "--methods", methods, "--jobs", "2", "--set", SMALL]
        return subprocess.Popen(
            [sys.executable, str(BENCH / "published.py"), *words, "--out", str(kept / "found.json")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
            stdout=subprocess.PIPE,
            text=True,
        )

    with call("dense") as first:
        while first.poll() is None and not [*kept.glob("compared/*/cells/*/*/checkpoint/checkpoint.json")]:
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
    clients = {file: file.stat().st_mtime_ns for file in kept.glob("clients-*/*.safetensors")}
    with call("fedens;dense") as second:
        said = second.communicate()[0]

    assert second.returncode == 0, said
    assert len(clients) == 10
    assert {file: file.stat().st_mtime_ns for file in clients} == clients
    (stage,) = kept.glob("compared/*-dense/cells/*/*/result.json")
    assert read_json(stage)["resumed_at"] > 0
    rows = {row["name"]: row for row in read_json(kept / "found.json")["rows"]}
    assert rows.keys() == {"run", "fedens", "dense"}
    assert rows["dense"]["curve"][-1] == [30, rows["dense"]["accuracy"]["DENSE"]]
    assert rows["run"]["accuracy"]["FedENS"] == rows["fedens"]["accuracy"]["FedENS"]
    assert {row["settings"] for row in rows.values()} == {SMALL}
