"""What a node says of itself: in its own config, or in a file that a rehearsal plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_app.node_config import SUPERNODES_VARIABLE, checkpoint_path, node_facts, read_nodes
from strategies.core.errors import OptionError

SIMULATED = {"partition-id": 1, "num-partitions": 3}


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


@pytest.mark.parametrize("config", [SIMULATED, {"client": "hospital-a", **SIMULATED}, {}])
def test_deployed_node_refuses_to_be_another(
    nodes: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SUPERNODES_VARIABLE, raising=False)
    with pytest.raises(OptionError, match="'client.nodes' is .*: must be '' outside `oneshot run`"):
        node_facts(config, {"client.nodes": str(nodes)})


def test_node_with_a_name_of_its_own_refuses_to_be_another_even_in_a_simulation(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUPERNODES_VARIABLE, "3")
    with pytest.raises(OptionError, match="must be '' outside `oneshot run`"):
        node_facts({"client": "hospital-a", **SIMULATED}, {"client.nodes": str(nodes)})


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"data_root": "/data"}, "the node's config has 'data_root': must be one of client, partition-id"),
        ({"partition-id": "0"}, "partition-id is '0': must be a whole number"),
        ({"partition-id": True}, "partition-id is 'True': must be a whole number"),
        ({"client": 7}, "client is '7': must be a text"),
        ({"max-ensemble-mib": "big"}, "max-ensemble-mib is 'big': must be a number"),
        ({"device": "gpu"}, "device is 'gpu': must be auto, cpu, cuda"),
    ],
)
def test_node_config_with_a_typing_error_is_refused(config: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        node_facts(config, {})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('client = "alpha', "d.toml is not TOML"),
        ('client = "delta"', "d.toml names no examples and no model: must set partition-id, data-root or checkpoint"),
        ('client = "alpha"\npartition-id = 1', "a.toml and .*d.toml are both client 'alpha'"),
        ('client = "delta"\ncheckpoint = 3', "d.toml: checkpoint is '3': must be a text"),
        ('[client]\nname = "delta"', "d.toml: client is .*: must be a text"),
    ],
)
def test_file_that_is_no_node_is_refused_by_its_name(nodes: Path, text: str, line: str) -> None:
    (nodes / "d.toml").write_text(text)
    with pytest.raises(OptionError, match=line):
        read_nodes(nodes)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", None),
        ("/data/model.pt", "/data/model.pt"),
        ("/data/{client}/part-{partition}.pt", "/data/clinic-a/part-4.pt"),
        ("/data/{partition:03d}.pt", "/data/004.pt"),
        ("~/model.pt", "~/model.pt"),
        ("/data/{{}}/{partition:2}.pt", "/data/{}/ 4.pt"),
    ],
)
def test_a_template_when_filled_in_is_the_client_s_path(template: str, expected: str | None) -> None:
    path = checkpoint_path(template, client="clinic-a", partition_id=4)

    assert path == (None if expected is None else Path(expected))
