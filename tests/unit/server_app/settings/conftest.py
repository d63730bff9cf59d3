"""The uploads of a module's settings ``GIVEN``, and the run folder that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_fakes import Uploads, sent_by_clients, stored


@pytest.fixture(scope="module")
def sent(request: pytest.FixtureRequest) -> Uploads:
    return sent_by_clients(request.module.GIVEN, task=getattr(request.module, "TASK", "statistics"))


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, sent: Uploads, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("runs") / "run", request.module.GIVEN, *sent)
