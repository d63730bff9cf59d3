"""Fixtures of the Flower adapter's tests: messages can be made, waiting takes no time, and the log is heard."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from flower_fakes import Clock, act_in_a_run, wait_without_time
from flwr.common.logger import FLOWER_LOGGER


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the waiting loops."""
    act_in_a_run(monkeypatch)
    return wait_without_time(monkeypatch)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that are logged."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear = Ear(logging.INFO)
    FLOWER_LOGGER.addHandler(ear)
    yield lines
    FLOWER_LOGGER.removeHandler(ear)
