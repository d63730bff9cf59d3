"""What holds for every test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums of several threads round otherwise, and for models as small as these one is the fastest."""
    torch.set_num_threads(1)  # before all tests, so that what they share is made with one thread too
