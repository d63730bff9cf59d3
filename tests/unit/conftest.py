"""What holds for the unit tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strategies.distillation import generators

WIDTH = generators.WIDTH


@pytest.fixture(autouse=True, scope="module")
def narrow_generators() -> Iterator[None]:
    """Generate images by fewer channels, which takes a third of the time and asks the same questions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "WIDTH", 8)
        yield


@pytest.fixture
def wide_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate images by as many channels as outside of the tests."""
    monkeypatch.setattr(generators, "WIDTH", WIDTH)


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return the function that closes a folder, as one of mode 0700 is to every other user but root."""

    def closed(folder: Path) -> None:
        stat = os.stat

        def refuse(path: Any, **how: Any) -> os.stat_result:
            if not isinstance(path, int) and folder in Path(path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return stat(path, **how)

        monkeypatch.setattr(os, "stat", refuse)

    return closed


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that are logged by Flower's logger."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear, logger = Ear(logging.INFO), logging.getLogger("flwr")
    before = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)  # as Flower does, where it is imported
    yield lines
    logger.removeHandler(ear)
    logger.setLevel(before)
