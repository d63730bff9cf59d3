"""Runs on one's own tables, data function and model: from the clients' training to the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import replayed
from feature_fakes import sent_by_clients, stored

from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.data.opening import open_own
from fl_app.node_policy import NodePolicy
from server_app.report.evaluation import Row, read_answers, write_answers
from server_app.settings.build import check_before_start, held_out
from server_app.settings.read import read_settings
from strategies.core.errors import DataError, OneShotError, OptionError, UploadError
from strategies.core.options import Scalar
from strategies.run.run_folder import RunFolder

SMALL: dict[str, Scalar] = {
    "compute": "in-process", "device": "cpu", "threads": 1, "method": "fedavg", "client.epochs": 8, "client.lr": 0.05,
}  # fmt: skip
CSV: dict[str, Scalar] = {"data.name": "csv", "data.label": "outcome", "data.partition": "domains", "model.name": "mlp"}
OWN: dict[str, Scalar] = {
    "data.name": "own_run:load", "data.partition": "domains", "model.name": "own_run:Net",
    "method": "label-count-ensemble",
}  # fmt: skip
SCHEMA = """
classes = ["low", "high"]
[columns.dose]
mean = 5
deviation = 3
[columns.kind]
levels = ["a", "b"]
missing = "a"
"""
CODE = """
import numpy as np
from torch import nn


def load(split):
    rng = np.random.default_rng(0 if split == "train" else 1)
    labels = rng.integers(0, 3, 90)
    images = (80 * labels[:, None, None, None] + rng.integers(0, 60, (90, 2, 5, 5))).astype("uint8")
    return (images, labels, np.arange(90) % 3) if split == "train" else (images, labels)


def unequal(split):
    images, labels, *_ = load(split)
    return images, labels if split == "train" else labels.clip(max=1)


def floats(split):
    labels = np.arange(6) % 3
    return np.broadcast_to(labels[:, None, None, None] - 1.0, (6, 1, 16, 16)), labels


def rows(split):
    return np.ones((6, 4)), [0, 1] * 3


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * 25, 8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.features(x))
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_run.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    open_own.cache_clear()
    yield
    sys.modules.pop("own_run", None)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The rows of three clients, each a file, whose class follows from the dose and the kind."""
    folder = tmp_path / "tables"
    (folder / "train").mkdir(parents=True)
    (folder / "schema.toml").write_text(SCHEMA)
    rng = np.random.default_rng(0)
    for name in ("train/north", "train/south", "train/west", "test"):
        lines = ["dose,kind,outcome"]
        for _ in range(60):
            dose, kind = rng.uniform(0, 10), "ab"[rng.integers(2)]
            lines.append(f"{dose:.2f},{kind},{'high' if dose > (3 if kind == 'a' else 7) else 'low'}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return folder


def test_held_out_rows_of_a_patient_count_together(tables: Path, tmp_path: Path) -> None:
    """Five equal rows each of twelve patients."""
    file = tables / "test.csv"
    rows = file.read_text().splitlines()
    several = [f"{row},{number}" for number, row in enumerate(rows[1:13]) for _ in range(5)]
    file.write_text("\n".join([f"{rows[0]},patient", *several]))
    for other in (tables / "train").glob("*.csv"):
        lines = other.read_text().splitlines()
        other.write_text("\n".join([f"{lines[0]},patient", *(f"{row},{place}" for place, row in enumerate(lines[1:]))]))
    given = {**SMALL, **CSV, "data.root": str(tables), "data.group": "patient"}

    images, _ = held_out(read_settings(given))
    alone, _ = held_out(read_settings({**given, "data.group": ""}))

    assert alone is not None
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(images.data.images[0].numel(), 2))
    grouped, single = (each.scored(model)["scores"]["accuracy"] for each in (images, alone))
    assert grouped["value"] == single["value"]
    assert grouped["high"] - grouped["low"] > 1.5 * (single["high"] - single["low"])
    write_answers(tmp_path, [Row.of("one", "student", images.scored(model))], images, 2)
    stored = read_answers(tmp_path)
    assert stored.groups is not None
    assert np.array_equal(np.unique(stored.groups, return_counts=True)[1], [5] * 12)
    effects = stored.effects["one"]
    assert effects["accuracy"].mean() == pytest.approx(grouped["value"], abs=1e-6)


def run_of(given: dict[str, Scalar], path: Path, clients: int = 3) -> Path:
    """Train the clients, and store their uploads as a run does."""
    settings = read_settings({**SMALL, **given})
    check_before_start(settings, clients)
    flat = dict(settings.flat)
    return stored(path, flat, *sent_by_clients(flat, task=settings.choice.uploads, clients=clients))


def test_tables_of_three_clients_become_one_model(tables: Path, tmp_path: Path) -> None:
    run = run_of({**CSV, "data.root": str(tables)}, tmp_path / "run")

    result = replayed(run)

    assert result["table"][-1]["name"] == "FedAvg (one shot)"
    assert result["accuracy"] > 80
    assert "(5, " not in (tmp_path / "run" / "uploads.jsonl").read_text()


def test_own_data_and_an_own_model_become_a_result_with_a_card(tmp_path: Path) -> None:
    run = run_of(OWN, tmp_path / "run")

    result = replayed(run)

    assert result["accuracy"] > 90
    assert [row["kind"] for row in result["table"]] == ["client"] * 3 + ["baseline", "ensemble", "ensemble"]
    assert "own=['own_run:Net']" in (Path(result["run_dir"]) / "model_card.md").read_text()
    with RunFolder.open(run, write=False) as folder:
        assert [record.facts.architecture for record in folder.round(1).records()] == ["own_run:Net"] * 3


@pytest.mark.parametrize(
    ("given", "clients", "reason"),
    [
        ({}, 4, "4 clients where 'data.partition' is 'domains': must be 3"),
        ({"data.partition": "iid"}, 3, "'data.partition' is 'iid': must be 'domains'"),
        ({"data.name": "own_run:unequal", "data.partition": "iid"}, 3, "shows 3 classes to train on, and 2 to test on"),
        ({"data.name": "own_run:rows", "data.partition": "iid", "model.name": "mlp", "client.augmentation": "flip"}, 2,
         "'client.augmentation' is 'flip': must be 'data-set' or 'none' where .* whose examples are not images"),
        ({"model.name": "lenet5"}, 3, "the model zoo cannot take examples of shape"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_at_once(given: dict[str, Scalar], clients: int, reason: str) -> None:
    with pytest.raises(OneShotError, match=reason) as error:
        check_before_start(read_settings({**SMALL, **OWN, **given}), clients)
    assert isinstance(error.value, DataError | OptionError)


@pytest.mark.parametrize(
    "given",
    [{"method": "fafi"}, {"method": "fedcvae-ens"}, {"attack.kind": "backdoor", "attack.clients": "client-000"}],
)
def test_float_images_that_are_no_pixels_are_refused_where_pixels_are_changed_or_made(given: dict[str, Scalar]) -> None:
    settings = read_settings({**SMALL, **given, "data.name": "own_run:floats", "model.name": "lenet5"})
    with pytest.raises(DataError, match=r"^data set 'own_run:floats' has float images with values outside \[0, 1\]"):
        check_before_start(settings, 2)


def test_a_deployed_node_reads_its_own_tables_and_runs_no_code_that_it_does_not_list(tables: Path) -> None:
    settings = read_settings({**SMALL, **OWN})
    facts = {"client": "north", "data-root": str(tables)}
    listing = {**facts, "architectures": "own_run:Net", "data-sources": "own_run:load"}
    node = Node.of(listing, settings.app, NodePolicy.of(listing, deployed=True))
    with pytest.raises(OptionError, match="1 client|3, one client"):  # the source is called, and has three holders
        prepare_upload(settings.app, node, TrainRequest("", 1, 0), {})
    refusing = {**facts, "architectures": "own_run:Net"}
    node = Node.of(refusing, settings.app, NodePolicy.of(refusing, deployed=True))
    with pytest.raises(UploadError, match="'own_run:load': must be among this node"):
        prepare_upload(settings.app, node, TrainRequest("", 1, 0), {})


def test_a_deployed_node_tells_the_server_no_value_of_its_rows(tables: Path) -> None:
    for file in (tables / "train").glob("*.csv"):
        file.unlink()
    (tables / "train.csv").write_text("dose,kind,outcome\nsecret,a,low\n")
    settings = read_settings({**SMALL, **CSV, "data.root": "/elsewhere"})
    facts = {"client": "north", "data-root": str(tables)}
    node = Node.of(facts, settings.app, NodePolicy.of(facts, deployed=True))

    with pytest.raises(UploadError) as error:
        prepare_upload(settings.app, node, TrainRequest("", 1, 0), {})

    assert str(error.value) == "data set 'csv' cannot be read on this node; its log has the reason"
