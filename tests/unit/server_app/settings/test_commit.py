"""A run knows the commit of its code, and whether files differed from it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from server_app.settings.commit import COMMIT_VARIABLE, commit_facts, commit_of


@pytest.mark.skipif(shutil.which("git") is None, reason="no git is installed")
def test_commit_is_that_of_the_folder_and_tells_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        own = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run([*own, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("x = 1")
    git("add", "-A")
    git("commit", "--quiet", "--message", "one")
    clean = commit_of(tmp_path)
    (tmp_path / "code.py").write_text("x = 2")

    assert git("rev-parse", "HEAD").startswith(clean)
    assert len(clean) == 12
    assert commit_of(tmp_path) == f"{clean}+changes"


def test_commit_of_no_repository_is_empty_or_the_caller_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path) == ""
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    assert commit_facts() == {"commit": "abc"}
