"""How many clients a run has, whatever nodes they are on."""

from __future__ import annotations

import pytest
from flower_fakes import SIGNATURES, DeployedGrid, failing

from strategies.flower.nodes import Limits, Nodes, Refusals
from strategies.flower.rounds.round_trip import RoundTrip, Terms
from strategies.run.traffic import Traffic


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(DeployedGrid({5: failing("off"), 6: failing("off")}), Refusals(None), Traffic())


def trip_of(nodes: Nodes) -> RoundTrip:
    terms = Terms(1, Limits(5.0), num_classes=10)
    return RoundTrip(nodes, run_id="", signatures={"net": SIGNATURES["net"]}, terms=terms)


def test_a_client_whose_supernode_started_again_counts_once(nodes: Nodes) -> None:
    trip = trip_of(nodes)
    nodes.names.pin(5, "alice")
    nodes.names.pin(6, "bob")
    assert (trip.nodes(1, fraction=1.0, seed=0), trip.most) == ([5, 6], 2)

    nodes.grid.nodes[9] = failing("off")  # type: ignore[attr-defined]
    trip.nodes(2, fraction=1.0, seed=0)
    assert trip.most == 3  # perhaps another client
    nodes.names.pin(9, "bob")
    assert trip.most == 2

    nodes.grid.nodes[11] = failing("off")  # type: ignore[attr-defined]
    trip.nodes(3, fraction=1.0, seed=0)
    assert trip.most == 3
    nodes.names.barred.add(11)
    assert trip.most == 2
