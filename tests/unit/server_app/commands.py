"""What most tests of the app do: run the command, replay a run, finish one, and run the code of a model card."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from server_app import cli as command_line
from server_app.compare.comparison import Comparison, compare_runs
from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run
from server_app.report.finish import finish
from server_app.settings.read import Settings
from server_app.settings.server_data import Scorer
from strategies.core.facts import UploadFacts
from strategies.core.options import Scalar
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport, keep_outcome

MakeRun = Callable[..., Path]  # the fixture run_folder
Stage = Callable[..., Any]  # the fixture stage
REQUEST = ("resume", "model", "evaluate")


def oneshot(*words: object) -> Any:
    return CliRunner().invoke(command_line.cli, [str(word) for word in words], catch_exceptions=False)


def completed(ended: tuple[int, dict[str, Any], str]) -> tuple[dict[str, Any], str]:
    """Return the JSON and the log of a command that has to succeed."""
    status, result, log = ended
    assert status == 0, log
    return result, log


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their keys: ``server__epochs`` stands for ``server.epochs``."""
    return {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}


def replayed(
    run: Path | Mapping[str, Any], method: str = "", folder: Path | None = None, *,
    log: Callable[[str], Any] = str, **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """Replay a run, named by its folder or its result, with settings and the other options of a request."""
    options: dict[str, Any] = {key: given.pop(key) for key in REQUEST if key in given}
    settings: dict[str, Scalar] = named(given)
    run = Path(run["run_dir"]) if isinstance(run, Mapping) else run
    return replay_run(ReplayRequest(run, method, settings, folder=folder, **options), log=log)


def compared(*runs: Path, methods: str = "fedens", log: Callable[[str], Any] = str, **how: Any) -> dict[str, Any]:
    """Compare methods on the uploads of runs."""
    return compare_runs(Comparison(runs, methods, **how), log=log)


def run_card(folder: Path) -> dict[str, Any]:
    """Run the code that a model card shows, in the folder of its run; return its names."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "model_card.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with chdir(folder):
        exec(code, names)  # noqa: S102  our own card
    return names


def finished_in(
    path: Path, report: StageReport, settings: Settings, images: Scorer, *, log: Callable[[str], Any] = str,
    **seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Keep the outcome of a stage in a run folder, with its scores and report; return the result."""
    with RunFolder.open(path) as folder:
        keep_outcome(folder, report, 1)
        return finish(folder, settings, report, images, seconds=seconds, log=log)


def foreign_run(path: Path, uploads: Mapping[str, tuple[str, Mapping[str, torch.Tensor]]], **facts: Any) -> Path:
    """Make a run folder as the strategies of another project leave it; uploads: client -> (architecture, weights)."""
    facts = {"method": "fedens", "seed": 4, "student": "model", "num-classes": 3, "input-shape": [1, 4, 4], **facts}
    info = {"normalization": [[0.5], [0.5]], **facts}
    with RunFolder.create(path, info) as folder:
        for client, (architecture, state) in uploads.items():
            folder.round(1).accept(UploadFacts(client, architecture, 5), dict(state))
    return path
