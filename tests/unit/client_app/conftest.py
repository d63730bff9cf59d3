from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process act in a run of Flower's, without waiting, with clients' files in a folder of the test."""
    from flower_fakes import act_in_a_run, wait_without_time

    act_in_a_run(monkeypatch)
    wait_without_time(monkeypatch)
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The app sets its process's threads; the tests are one process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
