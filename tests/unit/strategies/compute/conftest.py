"""What holds for the tests of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def narrow_generators() -> None:
    """Leave the generators as wide as they are: processes of their own see no fixture."""
