"""Fixtures of the Flower adapter's tests: messages can be made, and waiting takes no time."""

from __future__ import annotations

import pytest
from flower_fakes import Clock, act_in_a_run, wait_without_time


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the waiting loops."""
    act_in_a_run(monkeypatch)
    return wait_without_time(monkeypatch)
