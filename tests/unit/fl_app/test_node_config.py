"""What a node says of itself: in its own config, or in a file that a rehearsal plays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_app.node_config import SUPERNODES_VARIABLE, node_facts, node_policy, read_nodes
from fl_app.node_policy import CACHE_MIB, FREE, NodePolicy
from strategies.core.errors import OptionError, UploadError

SIMULATED = {"partition-id": 1, "num-partitions": 3}
NAMED = {"client": "hospital-a"}


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / "b.toml").write_text('client = "beta"\ncheckpoint = "models/{client}.pt"\narchitecture = "mlp"\n')
    (folder / "a.toml").write_text('client = "alpha"\npartition-id = 0\nnum-partitions = 2\nmax-ensemble-mib = 4\n')
    (folder / "c.toml").write_text('client = "gamma"\ndata-root = "/srv/data"\n')
    (folder / "notes.txt").write_text("no node")
    return folder


def test_nodes_are_read_in_the_order_of_their_files_with_paths_beside_them(nodes: Path) -> None:
    assert read_nodes(nodes) == [
        {"client": "alpha", "partition-id": 0, "num-partitions": 2, "max-ensemble-mib": 4},
        {"client": "beta", "checkpoint": str(nodes / "models/{client}.pt"), "architecture": "mlp"},
        {"client": "gamma", "data-root": "/srv/data"},
    ]
    assert [node["client"] for node in read_nodes(nodes / "b.toml")] == ["beta"]


def test_simulated_node_takes_the_config_of_its_number_and_nothing_of_flower_s(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUPERNODES_VARIABLE, "3")
    facts = node_facts(SIMULATED, {"client.nodes": str(nodes)})
    assert facts == read_nodes(nodes)[1]
    assert "partition-id" not in facts
    with pytest.raises(OptionError, match="which has 3 nodes: node 3 is missing"):
        node_facts({"partition-id": 3, "num-partitions": 4}, {"client.nodes": str(nodes)})


@pytest.mark.parametrize(
    ("config", "environment"),
    [(SIMULATED, {}), ({**NAMED, **SIMULATED}, {}), ({}, {}), ({**NAMED, **SIMULATED}, {SUPERNODES_VARIABLE: "3"})],
)
def test_a_deployed_node_and_one_with_a_name_of_its_own_refuse_to_be_another(
    nodes: Path, config: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SUPERNODES_VARIABLE, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="'client.nodes' is .*: must be '' outside `oneshot run`"):
        node_facts(config, {"client.nodes": str(nodes)})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('client = "alpha', "d.toml is not TOML"),
        ('client = "delta"', "d.toml names no examples and no model: must set partition-id, data-root or checkpoint"),
        ('client = "alpha"\npartition-id = 1', "a.toml and .*d.toml are both client 'alpha'"),
        ('client = "delta"\ncheckpoint = 3', "d.toml: checkpoint is '3': must be a text"),
        ('[client]\nname = "delta"', "d.toml: client is .*: must be a text"),
        ('share = "sum"', "d.toml: share is 'sum': must be one of sums, confusion, accuracy"),
        ("min-test-examples = 0", "d.toml: min-test-examples is 0: must be at least 1"),
        ("max-delta = 0.1", "d.toml has max-delta and no max-epsilon"),
        ('read = "models"', "d.toml: read has 'models': must be absolute paths"),
    ],
)
def test_file_that_is_no_node_is_refused_by_its_name(nodes: Path, text: str, line: str) -> None:
    (nodes / "d.toml").write_text(text)
    with pytest.raises(OptionError, match=line):
        read_nodes(nodes)


# What a node's own config permits a run's settings.


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"data_root": "/data"}, "the node's config has 'data_root': must be one of client, partition-id"),
        ({"partition-id": "0"}, "partition-id is '0': must be a whole number"),
        ({"partition-id": True}, "partition-id is 'True': must be a whole number"),
        ({"client": 7}, "client is '7': must be a text"),
        ({"max-ensemble-mib": "big"}, "max-ensemble-mib is 'big': must be a number"),
        ({"device": "gpu"}, "device is 'gpu': must be auto, cpu, cuda"),
        ({"max-epsilon": 0.0}, "max-epsilon is 0.0: must be a number greater than 0"),
        ({"max-epsilon": float("nan")}, "max-epsilon is nan: must be a number greater than 0"),
        ({"max-epsilon": float("inf")}, "max-epsilon is inf: must be a number greater than 0"),
        ({"max-epsilon": 10**400}, "max-epsilon is 1"),
        ({"read": "~unknown-user/models"}, "read has '~unknown-user/models': must be absolute paths"),
        ({"max-epsilon": 8.0, "max-delta": 1.0}, "max-delta is 1.0: must be a number greater than 0 and below 1"),
        ({"max-delta": 0.1}, "max-delta and no max-epsilon"),
        ({"max-ensemble-mib": -1.0}, "max-ensemble-mib is -1.0: must be at least 0"),
        ({"max-cache-mib": float("inf")}, "max-cache-mib is inf: must be at least 0"),
        ({"label-counts": "some"}, "label-counts is 'some': must be one of numbers, presence, none"),
        ({"read": "/a, b"}, "read has 'b': must be absolute paths"),
    ],
)
def test_config_with_a_wrong_key_or_value_is_one_line_with_key_and_range(facts: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError, match=re.escape(line)):
        node_facts(facts, {})


@pytest.mark.parametrize(
    ("key", "check", "shipped", "own"),
    [
        ("architectures", NodePolicy.check_architecture, "lenet5", "own.models:Net"),
        ("data-sources", NodePolicy.check_source, "cifar10", "own.data:load"),
    ],
)
def test_a_run_s_own_code_is_refused_by_a_deployed_node_that_does_not_list_it(
    key: str, check: Callable[[NodePolicy, str], None], shipped: str, own: str
) -> None:
    check(NodePolicy.of({key: f"own.other:Any, {own}"}, deployed=True), own)
    check(FREE, own)
    check(NodePolicy(deployed=True), shipped)
    with pytest.raises(UploadError, match=f"'{own}'.*: must be among this node's '{key}'"):
        check(NodePolicy(deployed=True), own)


@pytest.mark.parametrize(
    ("own", "most"), [({}, 9000.0), ({"client": "hospital-a"}, CACHE_MIB), ({"max-cache-mib": 2048.0}, 2048.0)]
)
def test_a_deployed_node_bounds_the_features_that_a_run_keeps_on_its_disk(own: dict[str, Any], most: float) -> None:
    config = {**SIMULATED, **own}

    policy = node_policy(config, node_facts(config, {}))

    assert policy.cache_mib(9000.0) == most
    assert policy.cache_mib(5.0) == 5.0
