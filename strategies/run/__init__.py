"""A run on disk and in progress: its folder, uploads, checkpoints, journal and server stage."""

import os
from pathlib import Path

RUNS_VARIABLE = "ONESHOT_RUNS"  # the environment variable that names the folder of the runs


def runs_folder(chosen: str = "") -> Path:
    """Return the folder of the runs: ``chosen``, else $ONESHOT_RUNS, else ``runs`` here; absolute."""
    return Path(chosen or os.environ.get(RUNS_VARIABLE, "") or "runs").expanduser().absolute()
