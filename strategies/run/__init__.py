"""A run on disk and in progress: its folder, uploads, checkpoints, journal and server stage."""

import os
from pathlib import Path

from ..core.errors import StoreError

RUNS_VARIABLE = "ONESHOT_RUNS"  # the environment variable that names the folder of the runs
FACTS_FILE = "run.json"  # written first; the file that makes a folder a run folder
RESULT_FILE = "result.json"  # written last


def runs_folder(chosen: str = "") -> Path:
    """Return the folder of the runs: ``chosen``, else $ONESHOT_RUNS, else ``runs`` here; absolute."""
    from ..core.places import expanded  # late: every method reads this module

    return expanded(chosen or os.environ.get(RUNS_VARIABLE, "") or "runs").absolute()


def is_run_folder(path: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    return (path / FACTS_FILE).is_file()


def check_run_folder(path: Path) -> None:
    """Refuse a folder that is no run folder.

    Raises:
        StoreError: It has no ``run.json``.
    """
    if not is_run_folder(path):
        raise StoreError(f"{path}: no run folder (it has no {FACTS_FILE})")
