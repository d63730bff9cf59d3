"""How a run that was cut off goes on: the file that it leaves for that, and the command that reads it.

``flwr run`` cannot read what a run began with: all that is not said is the app's default again, for the clients too.
So a deployed run leaves all of it in its folder, as a file for ``--run-config``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from server_app.settings.text import toml_table
from strategies.core.options import Scalar
from strategies.run.files import atomic_write, store_errors

RESUME_FILE = "resume.toml"


def leave_resume_file(folder: Path, settings: Mapping[str, Scalar]) -> None:
    """Write all settings of a run, with ``resume`` naming its folder.

    Raises:
        StoreError: The disk refuses.
    """
    text = toml_table({**settings, "run-dir": "", "resume": str(folder)})
    with store_errors(folder / RESUME_FILE):
        atomic_write(folder / RESUME_FILE, text.encode())


def how_to_go_on(folder: Path) -> str:
    """Return the command with which the operator of a deployment resumes a run."""
    return f"flwr run APP SUPERLINK --run-config {shlex.quote(str(folder / RESUME_FILE))}"
