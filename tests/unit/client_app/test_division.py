"""Which training images a client takes for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from client_app.node import Node, TrainRequest
from client_app.work import LocalExamples, copies_in, load_examples, prepare_upload
from fl_app.config import AppConfig, ClientConfig
from fl_app.data import GROUPS
from fl_app.data.config import DataConfig
from fl_app.data.domains import THINGS
from fl_app.models.config import ModelConfig
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


def test_no_share_of_a_client_cuts_a_patient_and_test_rows_that_equal_a_training_row_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "schema.toml").write_text('classes = ["healthy", "ill"]\n[columns.age]\n')
    rows = [f"p{k // 3},{k if k < 60 else 7},{('healthy', 'ill')[k // 3 % 2]}" for k in range(90)]
    (tmp_path / "train.csv").write_text("\n".join(["patient,age,outcome", *rows]))
    data = DataConfig(name="csv", root=str(tmp_path), label="outcome", group="patient", partition="iid")
    config = AppConfig(data=data, model=ModelConfig(name="logistic"), client=ClientConfig(epochs=1))
    node = Node("a", 0, 1, "logistic", "", str(tmp_path), has_data=True)
    request = TrainRequest("", 1, 0, holdout=0.2, test_share=0.3)

    own = load_examples(config, node, request)

    parts = [set(own.split.groups[part].tolist()) for part in (own.train, own.held, own.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 30
    copies = copies_in(own, own.split.take(own.train))
    ages = [int(row.split(",")[1]) for row in rows]
    assert copies == [k for k in own.test.tolist() if ages[k] in {ages[each] for each in own.train.tolist()}]
    prepare_upload(config, node, request, {})
    assert f"{len(copies)} of {len(own.test)} test examples are equal to a training example" in caplog.text
    assert f"row {copies[0] + 1}" in caplog.text


@pytest.mark.parametrize("kind", ["csv", "imagefolder"])
def test_a_node_with_a_test_half_of_its_own_is_scored_on_it_and_trains_on_all_the_rest(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for half, count in (("train", 10), ("test", 4)):
        for k in range(count):
            place = tmp_path / half / ("healthy", "ill")[k % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (k, 0, len(half))).save(place / f"p{k // 2}-{k}.png")
        rows = "".join(f"p{k // 2},{k + len(half) / 10},{('healthy', 'ill')[k % 2]}\n" for k in range(count))
        (tmp_path / f"{half}.csv").write_text(f"patient,age,outcome\n{rows}")
    (tmp_path / "schema.toml").write_text('classes = ["healthy", "ill"]\n[columns.age]\n')
    if kind == "csv":
        data = DataConfig(name="csv", label="outcome", group="patient", partition="iid", root=str(tmp_path / "server"))
    else:
        data = DataConfig(name=kind, image_size=16, group=r"(p\d+)-", partition="iid", root=str(tmp_path / "server"))
    model = "logistic" if kind == "csv" else "lenet5"
    config = AppConfig(data=data, model=ModelConfig(name=model), client=ClientConfig(epochs=1))

    def examples(clients: int, root: str, share: float = 0.3) -> LocalExamples:
        node = Node("a", 0, clients, model, "", root, has_data=True)
        return load_examples(config, node, TrainRequest("", 1, 0, test_share=share))

    own = examples(1, str(tmp_path))
    assert sorted(own.train.tolist()) == list(range(10))
    assert own.tested.labels[own.test].tolist() == ([0, 1, 0, 1] if kind == "csv" else [0, 0, 1, 1])
    assert len(own.tested.groups.unique()) == 2
    assert not copies_in(own, own.split.take(own.train))
    caplog.set_level("INFO", logger="flwr")
    prepare_upload(
        config, Node("a", 0, 1, model, "", str(tmp_path), has_data=True), TrainRequest("", 1, 0, test_share=0.3), {}
    )
    assert "scores are of its own test half, 4 examples" in caplog.text
    assert examples(1, str(tmp_path), share=0.0).own_test is None
    assert examples(2, str(tmp_path)).own_test is None  # a folder that two clients divide
