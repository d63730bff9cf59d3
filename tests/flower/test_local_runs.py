"""Methods of every kind in Flower's simulation and over the grid in this process: the same bits and bytes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from app_copy import pyproject

from client_app.app import app as client_app
from fl_app.node_config import SUPERNODES_VARIABLE
from server_app.launch.superlink import Scalar, launch
from server_app.settings.catalogue import toml_table
from server_app.settings.read import default_settings
from strategies import simulate

pytestmark = [pytest.mark.slow, pytest.mark.ray]

CLIENTS = 3
RUNS: dict[str, dict[str, Scalar]] = {
    "no phase": {"method": "tally", "threads": 1, "server.epochs": 2, "tally.images": 64},
    "no phase, two threads": {"method": "dense", "threads": 2, "server.epochs": 2, "server.generator-steps": 2},
    "a phase with rounds": {"method": "fens", "threads": 1, "fens.rounds": 3, "fens.server-lr": 0.05},
    "a phase that trains": {"method": "fusefl", "threads": 1},
    "a phase that trains, two threads": {"method": "fusefl", "threads": 2},
    "rounds": {"method": "iterative", "threads": 1, "iterative.rounds": 2, "iterative.strategy": "scaffold"},
}
SETTINGS: dict[str, Scalar] = {
    "client.epochs": 1, "client.lr": 0.05, "data.limit": 200, "min-uploads": CLIENTS, "server.steps-per-epoch": 4,
}  # fmt: skip
# All runs in one simulation: its start takes longer than they do.
PYPROJECT = pyproject("many_runs:app", "client_app.app:app")
APP = """
import json
import os

from flwr.serverapp import ServerApp
from server_app.app import app as whole_run

app = ServerApp()


@app.main()
def main(grid, context):
    given = dict(context.run_config)
    for changes in json.loads(os.environ["MANY_RUNS"]):
        context.run_config = {**given, **changes}
        whole_run(grid, context)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, without_plots: None) -> dict[str, Path]:
    """Run everything twice, and return where."""
    place = tmp_path_factory.mktemp("many")
    app = place / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(PYPROJECT + toml_table(default_settings()))
    (app / "many_runs.py").write_text(APP)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SUPERNODES_VARIABLE, str(CLIENTS))
        patch.syspath_prepend(str(app))
        for name, compute in (("simulation", "ray"), ("local", "in-process")):
            runs = [{**changes, "compute": compute, "run-dir": str(place / name / of)} for of, changes in RUNS.items()]
            patch.setenv("MANY_RUNS", json.dumps(runs))
            patch.setenv("ONESHOT_CLIENT_STATE", str(place / f"{name} clients"))
            if name == "simulation":
                lines: list[str] = []
                launched = launch(app, settings=SETTINGS, num_supernodes=CLIENTS, echo=lines.append, at_once=1)
                assert launched.exit_code == 0, (launched.reason, lines)
            else:
                server_app = importlib.import_module("many_runs").app
                simulate(server_app, client_app, clients=CLIENTS, run_config={**default_settings(), **SETTINGS})
        sys.modules.pop("many_runs")
    assert torch.get_num_threads() == threads
    return {name: place / name for name in ("simulation", "local")}


def end_of(run: Path) -> dict[str, Any]:
    """Return all that a run leaves but times."""
    result, traffic = (json.loads((run / name).read_text()) for name in ("result.json", "traffic.json"))
    rows = {name: run / f"{name}.jsonl" for name in ("uploads", "metrics")}
    timed = {"arrived", "digest", "seconds"}
    return {
        **{key: result.get(key) for key in ("status", "weights_sha256", "accuracy", "table", "refusals", "work")},
        "traffic": traffic["phases"],
        **{
            name: sorted(
                json.dumps({key: value for key, value in json.loads(row).items() if key not in timed}, sort_keys=True)
                for row in path.read_text().splitlines()
            )
            for name, path in rows.items()
            if path.exists()
        },
    }


@pytest.mark.parametrize("name", RUNS)
def test_bits_and_bytes_are_those_of_the_simulation(folders: dict[str, Path], name: str) -> None:
    local = end_of(folders["local"] / name)
    assert local["status"] == "finished"
    assert local["weights_sha256"]
    assert local == end_of(folders["simulation"] / name)
