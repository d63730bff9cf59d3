"""The examples: a Flower project, hospitals with tables, and a backbone, each executed or opened."""

from __future__ import annotations

import importlib
import json
import runpy
import shutil
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import ROOT
from typer.testing import CliRunner

from fl_app.models.backbones import backbone_of
from fl_app.node_config import read_nodes
from server_app import cli
from server_app.settings.build import check_before_start
from server_app.settings.catalogue import catalogue
from server_app.settings.read import read_settings
from strategies import RunOptions, Tally, TallyConfig, simulate

EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The example's folder, as the working directory."""
    folder = EXAMPLES / request.param
    before = set(sys.modules)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path))
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("stripes", "edges", "segmentation"):
            del sys.modules[name]


@pytest.mark.parametrize("here", ["flower_project"], indirect=True)
def test_flower_project_ends_with_a_student(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(here))
    tool = tomllib.loads((here / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    apps = {}
    for what, name in tool["components"].items():
        module, _, attribute = name.partition(":")
        apps[what] = getattr(importlib.import_module(module), attribute)
    server = importlib.import_module("stripes.server_app")
    quick = TallyConfig(epochs=4, images=512, probes=128)
    quickly = partial(Tally, config=quick, compute="in-process", options=RunOptions(threads=1))
    monkeypatch.setattr(server, "Tally", quickly)
    config = tool["config"]

    torch.manual_seed(1)  # the project draws its start weights without a seed
    simulate(apps["serverapp"], apps["clientapp"], clients=3, run_config=config)

    said = capsys.readouterr().out
    assert float(said.partition("accuracy of the student: ")[2].split()[0]) > 60  # of four classes, 25 % by chance


@pytest.mark.parametrize("here", ["hospitals"], indirect=True)
def test_hospitals_can_be_rehearsed_and_deployed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = read_settings(catalogue().settings([str(here / "settings.toml")]))
    check_before_start(settings, len(list((here / "tables" / "train").glob("*.csv"))))

    nodes = {facts["client"]: facts for facts in read_nodes(here / "nodes")}
    assert set(nodes) == {path.stem for path in (here / "tables" / "train").glob("*.csv")}
    assert {facts["architectures"] for facts in nodes.values()} == {settings.app.model.name}


@pytest.mark.parametrize("here", ["backbone"], indirect=True)
def test_backbone_has_the_features_that_it_promises(here: Path) -> None:
    found = backbone_of("edges:make")
    images = torch.rand(2, 3, found.side, found.side)

    features = found.build()(images)

    assert features.shape == (2, found.features)
    assert bool((features >= 0).all())
    check_before_start(read_settings({"method": "ridge", "features.backbone": "edges:make"}), 3)


def test_a_model_that_is_no_classifier_is_merged_replayed_and_scored_by_its_own_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLES / "segmentation.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path))
    runpy.run_path("segmentation.py", run_name="__main__")
    found = json.loads((tmp_path / "run/flower_result.json").read_text())["evaluate_metrics_serverapp"]["1"]["dice"]
    assert found > 85

    def replayed(method: str) -> Any:
        own = ["--method", method, "--model", "segmentation:UNet", "--evaluate", "segmentation:dice"]
        done = CliRunner().invoke(cli.cli, ["replay", "run", *own, "--format", "json"])
        return done.exit_code, json.loads(done.stdout.splitlines()[-1])

    status, again = replayed("ties")
    assert (status, again["metric"], again["accuracy"], again["plots"]) == (0, "dice", None, [])
    scores = {row["name"]: row["scores"]["dice"]["value"] for row in again["table"]}
    assert len(scores) == 5  # three clients, the average, TIES
    assert scores["FedAvg (one shot)"] == pytest.approx(found, abs=1e-5)
    assert scores["TIES"] == again["scores"]["dice"]["value"] > 85
    assert "dice" in (Path(again["run_dir"]) / "report.html").read_text()
    status, refused = replayed("fedens")
    assert (status, refused["error"]) == (
        1,
        "method 'fedens' needs num_classes and input_shape: the classes and the shape of one example",
    )
