"""What holds for the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

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
