"""A node with a valid key whose answer cannot be inflated: the run ends with the honest uploads, and names the node."""

from __future__ import annotations

from pathlib import Path

import pytest
from intruded import HOSPITALS, HOSTILE, attack_by, intruded, join, logged, run

pytestmark = pytest.mark.slow


def test_an_array_that_names_an_absent_chunk_costs_its_node_alone(tmp_path: Path) -> None:
    with intruded(tmp_path) as here:
        alone, _ = run(here, "alone")
        attack_by(here, "an absent chunk")
        join(here, HOSTILE)
        beside, _ = run(here, "beside")
        said = logged(here)

    ((client, reason),) = beside.pop("refusals")
    assert (client, reason.split(": ")[:2]) == (HOSTILE, ["its answer cannot be read", "IndexError"])
    assert f"refused {HOSTILE}: {reason}" in said
    assert alone.pop("refusals") == []
    assert [row["client"] for row in beside["uploads"]] == HOSPITALS
    assert beside == alone
