"""What the doctor says of a node's limits and of its privacy budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_app.config import AppConfig
from fl_app.ledger import Ledger
from fl_app.node_policy import FREE
from fl_app.privacy import PrivacyConfig
from server_app.doctor.node import NodeConfig
from server_app.doctor.roles import NodeMachine
from server_app.settings.read import read_settings


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("max-epsilon=-1.0", "-1.0"),
        ("max-epsilon=0.0", "max-epsilon is 0.0: must be a number greater than 0"),
        ('label-counts="some"', "must be one of numbers, presence, none"),
        ('read="here"', "must be absolute paths"),
        ('architectures="lenet5, lenet6"', "lenet6"),
        ('max-epsilon="8"', "'8'"),
        ('device="cpu:0"', "'cpu:0'"),
    ],
)
def test_limit_out_of_range_is_an_error_with_the_reason(given: str, found: str) -> None:
    errors = [finding for finding in NodeConfig.of(f'client="a" {given}').findings if finding.level == "error"]

    assert errors
    assert any(found in error.found for error in errors)


def test_an_architecture_of_one_s_own_code_is_no_error() -> None:
    assert NodeConfig.of('client="a" architectures="lenet5, own.models:Net"').findings == ()


def test_budget_shows_the_spent_part_and_a_damaged_ledger_is_an_error(tmp_path: Path) -> None:
    node = NodeConfig.of(f'client="a" max-epsilon=20.0 state-dir="{tmp_path}"')
    assert node.findings == ()
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
        "data.law": "domains",
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


def test_a_checkpoint_s_other_placeholder_is_an_error() -> None:
    node = NodeConfig.of('client="a" checkpoint="{name}.pt"')
    (model,) = (check for check in NodeMachine(read_settings({}), node).checks() if check.name == "model")

    (error,) = (finding for finding in model.run() if finding.level == "error")

    assert error.check == "checkpoint"
    assert error.found.startswith("checkpoint is '{name}.pt': its placeholders must be {client} and {partition}")


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
