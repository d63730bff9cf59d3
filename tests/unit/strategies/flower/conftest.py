"""Fixtures of the Flower adapter's tests: messages can be made, waiting takes no time, and the log is heard."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from flwr.common.logger import FLOWER_LOGGER
from flwr.supercore.task_identity import TaskIdentity

from strategies.flower import asking, evaluation, nodes
from strategies.flower.rounds import round_trip


class Clock:
    """Stands for the module ``time``: only sleeping takes time, and none of ours."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the waiting loops."""
    found = Clock()
    for module in (asking, evaluation, nodes, round_trip):
        monkeypatch.setattr(module, "time", found)
    # Flower stamps messages with the identity of its process.
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return found


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
