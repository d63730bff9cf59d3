"""Projects in the forms of Flower's examples, with the strategy changed and nothing else."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from flower_fakes import FakeGrid, stock, strategy
from flwr.cli.build import build_fab_from_disk

from strategies import OneShotFedAvg

PROJECT = """
[project]
name = "project"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "task:server"
clientapp = "task:client"
"""
TWO = FakeGrid({1: stock(1), 2: stock(2)})


def test_a_run_does_not_travel_with_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project := tmp_path / "project").mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "task.py").touch()
    monkeypatch.chdir(project)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = strategy(OneShotFedAvg, None)
    run.start(TWO)  # type: ignore[arg-type]

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(project))) as fab:
        assert sorted(fab.namelist()) == [".info/CONTENT", "pyproject.toml", "task.py"]
    assert (tmp_path / "state" / "oneshot-fl" / "runs") == run.folder.path.parent
