"""A folder like the one a reader of the pages works in: a project of one's own, and a finished run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flower_fakes import act_in_a_run
from torch import nn

from fl_app.models import build
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec
from strategies.run.ensembles import save_ensemble
from strategies.run.files import save_weights
from strategies.run.run_folder import RunFolder

PROJECT = '''"""Somebody's models."""
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        return self.head(self.layers(x))


class LargeNet(Net):
    def __init__(self):
        super().__init__(width=8)
'''


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    act_in_a_run(monkeypatch)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder, with the package ``my_project``; the working directory during the test."""
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "__init__.py").touch()
    (tmp_path / "my_project" / "model.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))
    yield tmp_path
    for name in ("my_project", "my_project.model"):
        sys.modules.pop(name, None)


@pytest.fixture
def finished_run(project: Path) -> Callable[[str, bool], Path]:
    """Make a run folder with two uploads, a student and an ensemble: of the app, or of the reader's project."""

    def lenet() -> nn.Module:
        return build("lenet5", num_classes=10, input_shape=(1, 16, 16))

    def make(name: str, foreign: bool) -> Path:
        if foreign:
            from my_project.model import Net  # type: ignore[import-not-found]
        builder = Net if foreign else lenet
        with RunFolder.create(project / name, {"method": "fedens", "seed": 0}) as folder:
            for k, client in enumerate(("a", "b")):
                torch.manual_seed(k)
                state, counts = builder().state_dict(), [1] * 10
                architecture = "model" if foreign else "lenet5"
                folder.round(1).accept(UploadFacts(client, architecture, 10, counts), state)
            save_weights(folder.path / "student.safetensors", builder().state_dict())
            save_ensemble(folder.path / "ensemble", EnsembleSpec(("a", "b"), "mean"), folder.round(1).uploads())
        return project / name

    return make
