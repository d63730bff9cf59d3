"""The command and replays in this process, and the code of a model card, as most tests of the app ask for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from server_app import cli as command_line
from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run
from strategies.core.options import Scalar

REQUEST = ("resume", "model", "evaluate")


def oneshot(*words: object) -> Any:
    return CliRunner().invoke(command_line.cli, [str(word) for word in words], catch_exceptions=False)


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


def run_card(folder: Path) -> dict[str, Any]:
    """Run the code that a model card shows, in the folder of its run; return its names."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "model_card.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with chdir(folder):
        exec(code, names)  # noqa: S102  our own card
    return names
