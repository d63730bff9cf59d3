"""Sums of features in a deployment: its head is the one that a single machine solves from all examples."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from deployments import ROOT, deployment
from safetensors.torch import load_file

from fl_app.config import AppConfig
from fl_app.data import normalize, open_split
from fl_app.division import own_positions
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from strategies.statistics.heads import Ridge
from strategies.statistics.sums import Statistics

pytestmark = pytest.mark.slow

BACKBONE, CLIENTS = "tiny_backbone:make", 3
HOME = ROOT / "tests" / "unit" / "server_app"


def test_a_deployed_head_is_that_of_all_examples_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HOME))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")]))
    run = tmp_path / "run"
    settings = (
        f"method='ridge' ridge.penalty=0.1 features.backbone='{BACKBONE}' compute='in-process' "
        f"min-uploads={CLIENTS} deadline-s=300 run-dir='{run}'"
    )
    with deployment(tmp_path) as here:
        for k in range(CLIENTS):
            here.node(f"node-{k}", f"partition-id={k} num-partitions={CLIENTS} architectures='lenet5, {BACKBONE}'")
        here.run(settings)
        here.until((run / "result.json").exists)
        result = json.loads((run / "result.json").read_text())
        assert result["status"] == "finished", here.logs()

    head = Ridge(pooled()).head(0.1)
    deployed = load_file(run / "student.safetensors")
    torch.testing.assert_close(deployed["head.weight"].double(), head.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(deployed["head.bias"].double(), head.bias, rtol=1e-4, atol=1e-4)
    assert result["uploads"] == CLIENTS


def pooled() -> Statistics:
    """Return the sums of all examples that a client holds, as one machine adds them up."""
    split, config = open_split("digits", "train"), AppConfig()
    held = [own_positions(split, config, partition_id=k, num_partitions=CLIENTS) for k in range(CLIENTS)]
    data = split.take(torch.cat(held))
    function = FeatureFunction(FeaturesConfig(backbone=BACKBONE), 0, *split.normalization)
    rows = function.module(normalize(data.images, *split.normalization))
    return Statistics.of([(rows, data.labels)], split.num_classes, function.features)
