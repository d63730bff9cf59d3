"""Apps for Flower: ours in a folder of its own, since Flower looks through every file of a folder, and small ones."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def _copied() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="app-")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = Path(folder.name, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    return folder


def app_copy() -> Path:
    """Return a folder with the files of the repository and no others, which this process removes at its end."""
    return Path(_copied().name)


def pyproject(serverapp: str, clientapp: str, config: str = "") -> str:
    """Return the pyproject.toml of a small app, which ends with its settings."""
    return f"""
[project]
name = "small-app"
version = "1.0.0"
description = "A small app."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "{serverapp}"
clientapp = "{clientapp}"
[tool.flwr.app.config]
{config}"""
