"""The commit of the code that a run was made with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

COMMIT_VARIABLE = "ONESHOT_COMMIT"  # set for the processes of a run, which Flower starts from a copy of the code
_PATIENCE_S = 5.0


def commit_facts() -> dict[str, str]:
    """Return the entry of run.json: the commit that the caller named, else that of this code; empty without one."""
    found = os.environ.get(COMMIT_VARIABLE) or commit_of(Path(__file__).resolve().parents[2])
    return {"commit": found} if found else {}


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in a folder, with "+changes" if files differ from it; empty without one."""
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    commit = _ask(git, folder, "rev-parse", "--short=12", "HEAD")
    changed = _ask(git, folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _ask(git: str, folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603  fixed words, in a folder of ours
            [git, "-C", str(folder), *words], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
