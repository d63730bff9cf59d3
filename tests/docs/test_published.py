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

from server_app.settings.catalogue import merge_settings
from server_app.settings.read import known_options, read_settings
from strategies.core.options import flatten, parse
from strategies.method import METHODS
from strategies.run.files import read_json

BENCH = ROOT / "tests" / "bench"
# What Co-Boosting's text says of CIFAR-10 in Table 1 and section B.1; its own learning rate of the generator, 1e3, is
# taken as 1e-3.
PAPER = {
    "data.name": "cifar10",
    "model.name": "cnn5",
    "client.epochs": 300,
    "client.batch-size": 128,
    "client.optimizer": "sgd",
    "client.lr": 0.01,
    "client.momentum": 0.9,
    "client.schedule": "constant",
}
STAGES = {
    "epochs": 500,
    "generator-steps": 30,
    "generator-lr": 1e-3,
    "generator-precision": "float32",
    "teacher-precision": "float32",
    "kd-temperature": 4.0,
    "student-lr": 0.01,
    "batch-size": 128,
    "synthesis-batch-size": 128,
    "steps-per-epoch": 0,
    "pool-cap": 0,
    "adversarial-weight": 1.0,
    "pool-augmentation": "crop-flip",
}
# Every program of a measurement starts without these packages.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in ("flwr", "ray", "cryptography")
        return None if missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
SMALL = (
    "data.name=digits model.name=lenet5 client.epochs=1 client.batch-size=32 checkpoint-s=0 server.epochs=30 "
    "server.generator-steps=1 server.synthesis-batch-size=8"
)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    return runpy.run_path(str(BENCH / "published.py"))


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.3])
def test_cells_of_cifar10_have_the_papers_settings(published: Mapping[str, Any], alpha: float) -> None:
    given = published["CELLS"][f"cifar10-{alpha:g}-0"].settings

    flat = read_settings(merge_settings(given, {option.key: option.kind for option in known_options()})).flat

    wanted = {**PAPER, "data.alpha": alpha, "data.held-out": "report", "seed": 0}
    assert {key: flat[key] for key in wanted} == wanted
    for name in ("dense", "co-boosting"):
        config = parse(METHODS[name].config, flat, name, "co-boosting")
        assert flatten(config).items() >= STAGES.items()
    assert (config.perturbation_size, config.reweighting_step) == (8 / 255, 0.0)  # 0.1 / n


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
