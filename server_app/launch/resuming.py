"""Resumes an interrupted deployed run: the file that the run leaves, and the command that reads it.

``flwr run`` cannot read a run's original settings: every setting that is not given has the app's default, for the
clients too. So a deployed run writes all its settings into its folder, as a file for ``--run-config``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from server_app.settings.text import toml_table
from strategies.core.durable import atomic_write, store_errors
from strategies.core.options import Scalar

RESUME_FILE = "resume.toml"


def leave_resume_file(folder: Path, settings: Mapping[str, Scalar]) -> None:
    """Write all settings of a run, with ``resume`` naming its folder.

    Raises:
        StoreError: The file cannot be written.
    """
    text = toml_table({**settings, "run-dir": "", "resume": str(folder)})
    with store_errors(folder / RESUME_FILE):
        atomic_write(folder / RESUME_FILE, text.encode())


def how_to_go_on(folder: Path) -> str:
    """Return the command with which the operator of a deployment resumes a run."""
    return f"flwr run APP SUPERLINK --run-config {shlex.quote(str(folder / RESUME_FILE))}"
