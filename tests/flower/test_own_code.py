"""A whole run on a model and a data set of the user's own, in the folder where the command is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server_app.launch.superlink import FOLDER_VARIABLE

pytestmark = pytest.mark.slow

CODE = """
import numpy as np
from torch import nn

from own_layers import layers  # beside this file


def load(split):
    rng = np.random.default_rng(0 if split == "train" else 1)
    labels = rng.integers(0, 3, 90)
    images = (80 * labels[:, None, None, None] + rng.integers(0, 60, (90, 1, 8, 8))).astype("uint8")
    return (images, labels, np.arange(90) % 2) if split == "train" else (images, labels)


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = layers(input_shape)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        return self.head(self.features(images))
"""
LAYERS = """
from torch import nn


def layers(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 16), nn.ReLU())
"""


@pytest.mark.ray
def test_clients_server_and_ray_actor_find_the_code_of_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(CODE)
    (tmp_path / "own_layers.py").write_text(LAYERS)
    settings = "model.name=own_task:Net data.name=own_task:load data.law=domains tally.epochs=1 tally.images=64"
    environment = {key: value for key, value in os.environ.items() if key != FOLDER_VARIABLE}
    places = {"ONESHOT_RUNS": str(tmp_path / "runs"), "ONESHOT_CLIENT_STATE": str(tmp_path / "state")}

    done = subprocess.run(
        [Path(sys.executable).with_name("oneshot"), "run", "--set", settings, "--clients", "2", "--format", "json"],
        cwd=tmp_path, env={**environment, **places}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["status"], result["uploads"], result["refused"]) == ("finished", 2, 0)
    assert "own_task:Net" in (Path(result["run_dir"]) / "uploads.jsonl").read_text()
