"""The folder of a client's state of one run, on its own disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from . import refusals
from .durable import sync_folder

# A client's disk is no archive: it keeps the newest runs.
RUNS_KEPT = 16

# The ids of run folders. No other folder is made, because the parent may be the user's own.
RUN_ID = re.compile(r"[0-9a-f]{32}")
# The file that marks a folder of ours. Nothing in a folder without it is ever removed.
MARKER = ".oneshot-fl"


def expand_user(path: Path | str) -> Path:
    """Return a path whose "~" or "~user" is the home folder; that of an unknown user stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  pathlib's raises an error of its own for an unknown user


def nearest_existing(path: Path | str) -> Path:
    """Return the absolute path, or its nearest existing parent; a folder that is closed to this user exists."""
    path = expand_user(path).absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))  # noqa: PTH110  pathlib's may raise


def state_root(state_dir: str) -> Path:
    """Return a client's folder; empty: ``$ONESHOT_CLIENT_STATE``, else one in the user's cache."""
    return expand_user(state_dir or os.environ.get("ONESHOT_CLIENT_STATE", "") or "~/.cache/oneshot-fl/clients")


def run_place(state_dir: str, run_id: str) -> Path:
    """Return a client's folder for one run, whether it exists or not.

    Args:
        state_dir: The client's folder; empty: ``$ONESHOT_CLIENT_STATE``, else a folder in the user's cache.

    Raises:
        UploadError: The id is not that of a run folder.
    """
    if not RUN_ID.fullmatch(run_id):
        raise refusals.bad_request("run-id", run_id, "32 hexadecimal digits")
    return state_root(state_dir) / run_id


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, open to this user alone; an existing one keeps its mode.

    Raises:
        OSError: The folder cannot be made.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def make_run_place(folder: Path) -> None:
    """Make a client's folder for one run, with its marker; a folder with other content stays unchanged.

    Raises:
        OSError: It cannot be made.
    """
    make_private(folder)
    if not any(folder.iterdir()):
        (folder / MARKER).touch()
        sync_folder(folder)


def is_ours(folder: Path) -> bool:
    """Return whether a folder has our marker, so that files in it may be removed; one that is closed to us has none."""
    return os.path.isfile(folder / MARKER)  # noqa: PTH113  pathlib's raises for a folder of another user


def forget_older_runs(folder: Path) -> None:
    """Remove a client's oldest runs, so that :data:`RUNS_KEPT` stay with this one; it stays whatever its time."""
    forget_old_runs(folder.parent, RUNS_KEPT - is_ours(folder), beside=folder.name)


def forget_old_runs(root: Path, kept: int, *, beside: str = "") -> tuple[list[str], list[str]]:
    """Remove all but the newest runs' marked folders; a folder's time is that of its last use.

    Args:
        root: A client's folder, which may be missing; everything else in it stays.
        beside: A run that stays beside them: after the clock was set back, the one in use looks like the oldest.

    Returns:
        The ids of the runs that are removed, and of those that the disk keeps.
    """
    found = root.iterdir() if root.is_dir() else ()
    others = (path for path in found if RUN_ID.fullmatch(path.name) and path.name != beside)
    old = newest_first(filter(is_ours, others))[max(0, kept) :][::-1]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    kept_back = [path.name for path in old if path.exists()]
    return [path.name for path in old if path.name not in kept_back], kept_back


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return files or folders by the time of their last use."""
    return sorted(paths, key=_last_used, reverse=True)


def check_round(server_round: int) -> None:
    """Refuse the number of a round that is part of a file's name, unless it is at least 1.

    Raises:
        UploadError: The server has named another.
    """
    if server_round < 1:
        raise refusals.bad_request("server-round", server_round, "at least 1")


def _last_used(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # another client on this machine has just removed it
        return 0
