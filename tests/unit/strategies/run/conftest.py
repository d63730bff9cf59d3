"""Fixtures of the store's tests."""

from __future__ import annotations

import pytest
from store_faults import Faults


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)
