"""Fixtures of the Flower adapter's tests: messages can be made, and waiting takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flower_fakes import Clock, act_in_a_run, wait_without_time

from strategies.run.run_folder import RoundFolder, RunFolder


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the waiting loops."""
    act_in_a_run(monkeypatch)
    return wait_without_time(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RoundFolder]:
    """The folder of a run's first round."""
    with RunFolder.create(tmp_path / "run", {}) as run:
        yield run.round(1)
