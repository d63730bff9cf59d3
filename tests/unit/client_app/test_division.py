"""Which training images a client takes for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from client_app.node import Node, TrainRequest
from client_app.work import load_examples
from fl_app.config import AppConfig
from fl_app.data import GROUPS
from fl_app.data.domains import THINGS
from strategies.core.errors import OptionError
from strategies.core.options import Scalar


def positions(partition_id: int, clients: int, **settings: Scalar) -> torch.Tensor:
    config = AppConfig.from_settings({f"data.{key.replace('_', '-')}": value for key, value in settings.items()})
    node = Node(f"client-{partition_id:03d}", partition_id, clients, "cnn5", "", config.data.root, has_data=True)
    return load_examples(config, node, TrainRequest("", 1, 0)).train


@pytest.mark.parametrize("law", ["classes", "dirichlet-overlap", "dirichlet-classes"])
def test_a_node_whose_data_are_its_own_holds_all_of_them(law: str) -> None:
    assert sorted({*positions(0, 1, partition=law).tolist()}) == list(range(1297))


@pytest.mark.parametrize(("limit", "held"), [(0, 7), (3, 3)])
def test_clients_when_each_holds_a_domain_hold_no_other(tmp_path: Path, limit: int, held: int) -> None:
    for domain in GROUPS["pacs"].domains:
        for name in THINGS:
            (tmp_path / "PACS" / domain / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / "PACS" / domain / name / "a.png")
    asked = {"name": "pacs", "partition": "domains", "left_out": "sketch", "image_size": 4, "root": str(tmp_path)}

    parts = [positions(k, 3, limit=limit, **asked) for k in range(3)]

    assert [len(part) for part in parts] == [held] * 3
    assert [(part // 7).unique().tolist() for part in parts] == [[0], [1], [2]]
    with pytest.raises(OptionError, match="1 clients where 'data.partition' is 'domains': must be one client for each"):
        positions(0, 1, **asked)  # without a number: that of a node's own holders is no matter of the server
    with pytest.raises(OptionError, match="2 clients where 'data.partition' is 'domains': must be 3"):
        positions(0, 2, **asked)
