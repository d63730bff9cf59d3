"""Fixtures of the store's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_faults import Faults

from strategies.run.files import FolderLock
from strategies.run.round_folder import RoundFolder


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> RoundFolder:
    """The folder of a round, open for writing."""
    return RoundFolder(tmp_path, FolderLock(tmp_path))
