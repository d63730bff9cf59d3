"""What the doctor says of a node's limits and of its privacy budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_app.config import AppConfig
from fl_app.ledger import Ledger
from fl_app.node_policy import FREE
from fl_app.privacy import PrivacyConfig
from server_app.doctor.data import NodeConfig
from strategies.core.errors import UploadError


def test_budget_shows_the_spent_part_and_a_damaged_ledger_is_an_error(tmp_path: Path) -> None:
    node = NodeConfig.of(f'client="a" max-epsilon=20.0 state-dir="{tmp_path}"')
    ledger = Ledger.of(tmp_path, "a")
    ledger.enter(PrivacyConfig(epsilon=8.0), FREE, run="r", server_round=1)

    (fine,) = node.budget()
    ledger.path.write_text("{}")
    (damaged,) = node.budget()

    assert (fine.level, damaged.level) == ("ok", "error")
    assert fine.found.startswith("epsilon 8 of 20 and delta 1e-05 of 0.0001 are spent")
    assert str(ledger.path) in damaged.found
    assert list(NodeConfig.of('client="a"').budget()) == []


def test_what_the_limits_refuse_of_a_planned_run_is_an_error() -> None:
    given = 'client="a" partition-id=2 num-partitions=3 architectures="lenet5, cnn5" read="/srv"'
    planned = {
        "data.name": "own.data:rows",
        "data.partition": "domains",
        "client.checkpoint": "/models/{client}-{partition}.pt",
    }

    errors = list(NodeConfig.of(given).refusals(AppConfig.from_settings(planned), "resnet8"))

    assert [error.level for error in errors] == ["error"] * 3
    assert [error.found.partition(":")[0] for error in errors] == [
        "setting 'data.name' is 'own.data",
        "architecture 'resnet8' is not permitted on this node",
        "setting 'client.checkpoint' is '/models/a-2.pt'",
    ]
    fine = {"client.checkpoint": "/srv/{client}.pt"}
    assert list(NodeConfig.of(given).refusals(AppConfig.from_settings(fine), "cnn5")) == []
    assert list(NodeConfig.of("partition-id=0").refusals(AppConfig.from_settings(planned), "resnet8")) == []


def test_a_checkpoint_s_other_placeholder_is_refused() -> None:
    with pytest.raises(UploadError, match="its placeholders must be {client} and {partition}"):
        NodeConfig.of('client="a"').filled("{name}.pt")


@pytest.mark.parametrize(
    ("given", "looked"),
    [
        ('client="a"', ""),
        ('client="a" read="/srv"', "/srv/held"),
        ('client="a" data-root="/data"', "/data"),
        ("partition-id=0 num-partitions=2", "/srv/held"),
    ],
)
def test_data_are_looked_for_where_the_node_looks(given: str, looked: str) -> None:
    assert NodeConfig.of(given).data_root("/srv/held") == looked
