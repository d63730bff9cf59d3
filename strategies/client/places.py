"""The folder of a client's state of one run, on its own disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..core.errors import UploadError

# A client's disk is no archive: it keeps the newest runs.
RUNS_KEPT = 16

# The ids of run folders. No other folder is made or removed, because the parent may be the user's own.
RUN_ID = re.compile(r"[0-9a-f]{32}")


def run_place(state_dir: str, run_id: str) -> Path:
    """Return a client's folder for one run, whether it exists or not.

    Args:
        state_dir: The client's folder; empty: ``$ONESHOT_CLIENT_STATE``, else a folder in the user's cache.
        run_id: The run folder's id, as the server sends it.

    Raises:
        UploadError: The id is not that of a run folder.
    """
    if not RUN_ID.fullmatch(run_id):
        raise UploadError(f"the server's run-id is {run_id[:80]!r}: must be 32 hexadecimal digits")
    place = state_dir or os.environ.get("ONESHOT_CLIENT_STATE", "") or "~/.cache/oneshot-fl/clients"
    return Path(place).expanduser() / run_id


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, open to this user alone; an existing one keeps its mode.

    Raises:
        OSError: The folder cannot be made.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def forget_old_runs(root: Path) -> None:
    """Remove all but the newest runs' folders; a folder's time is that of its last use."""
    runs = sorted((path for path in root.iterdir() if RUN_ID.fullmatch(path.name)), key=_last_used)
    for path in runs[:-RUNS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another client on this machine has just removed it
        return 0.0
