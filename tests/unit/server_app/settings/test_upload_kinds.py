"""FedOV and FedCVAE-Ens from the clients' training to the result, and their uploads under other methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import replayed, run_card
from test_own_runs import run_of

from client_app.keeping import KeptModel
from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.data import open_split
from fl_app.models.uploaded import uploaded_builders
from server_app.settings.build import build_job
from server_app.settings.read import read_settings
from strategies.core.durable import read_json
from strategies.core.errors import OptionError, UploadError
from strategies.core.facts import kind_of
from strategies.method import METHODS

CLIENTS = 3
Runs = Callable[[str], Path]
SETTINGS: dict[str, Any] = {
    "compute": "in-process", "device": "cpu", "threads": 1, "data.partition": "iid", "model.name": "mnist-cnn",
    "client.optimizer": "adam", "client.lr": 0.003, "client.batch-size": 16, "client.latent": 6,
    "client.attack-steps": 1, "fedcvae-ens.images": 900, "server.epochs": 3,
}  # fmt: skip
QUICK = {"data.limit": 90, "client.epochs": 1}
# As little as each method learns something with.
ENOUGH = {"fedov": {"data.limit": 240, "client.epochs": 4}, "fedcvae-ens": {"data.limit": 450, "client.epochs": 8}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that has clients train what a method asks for, a little, and leaves their run folder."""
    made: dict[str, Path] = {}

    def make(method: str) -> Path:
        if method not in made:
            made[method] = run_of({**SETTINGS, **QUICK, "method": method}, tmp_path_factory.mktemp("runs") / method)
        return made[method]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("method", "least"), [("fedov", 60.0), ("fedcvae-ens", 30.0)])
def test_methods_on_other_uploads_learn(tmp_path: Path, method: str, least: float) -> None:
    result = replayed(run_of({**SETTINGS, **ENOUGH[method], "method": method}, tmp_path / "run"), method)

    assert result["accuracy"] == result["table"][-1]["accuracy"] > least
    if method == "fedov":
        assert result["table"][0]["accuracy"] > 50.0  # among the ten classes, whatever it says of "unknown"


@pytest.mark.parametrize(
    ("method", "title", "architecture", "combiner"),
    [("fedov", "FedOV", "mnist-cnn+unknown", "open-set"), ("fafi", "FAFI", "mnist-cnn+prototypes", "prototypes")],
)
def test_an_ensemble_of_models_with_further_outputs_from_training_to_result(
    run: Runs, tmp_path: Path, method: str, title: str, architecture: str, combiner: str
) -> None:
    lines: list[str] = []

    result = replayed(run(method), method, tmp_path / "replay", log=lines.append)

    names = [(row["name"], row["kind"]) for row in result["table"]]
    assert names == [*((f"client-00{k}", "client") for k in range(CLIENTS)), (title, "ensemble")]
    facts = read_json(tmp_path / "replay" / "ensemble" / "ensemble.json")
    assert {member["architecture"] for member in facts["members"]} == {architecture}
    assert facts["combiner"]["name"] == combiner
    assert lines_of_evaluation(lines)[-1] == f"evaluation: batch {CLIENTS} of {CLIENTS}"
    assert run_card(tmp_path / "replay")["model"](torch.zeros(2, 1, 16, 16)).shape == (2, 10)


def lines_of_evaluation(lines: list[str]) -> list[str]:
    return [line.partition(",")[0] for line in lines if line.startswith("evaluation: ")]


def test_decoders_from_training_to_result(run: Runs, tmp_path: Path) -> None:
    lines: list[str] = []

    result = replayed(run("fedcvae-ens"), "fedcvae-ens", tmp_path / "replay", log=lines.append)

    assert [(row["name"], row["kind"]) for row in result["table"]] == [("FedCVAE-Ens (3 epochs of 10)", "student")]
    assert (tmp_path / "replay" / "student.safetensors").exists()
    assert "synthetic_images.png" in result["plots"]
    assert lines_of_evaluation(lines)[-1] == "evaluation: batch 1 of 1"


def test_a_result_by_test_batch_is_marked(run: Runs, tmp_path: Path) -> None:
    marked = replayed(run("fafi"), "fafi", tmp_path / "marked", **{"fafi.bn": "test-batch"})

    assert marked["table"][-1]["name"] == "FAFI (transductive)"
    assert "with FAFI (transductive) (" in (tmp_path / "marked" / "model_card.md").read_text()


@pytest.mark.parametrize(
    ("ran", "asked"), [("fedov", "fedens"), ("fafi", "fedov"), ("fedcvae-ens", "fafi"), ("fedov", "fedcvae-ens")]
)
def test_uploads_of_another_kind_are_refused_in_one_line(run: Runs, tmp_path: Path, ran: str, asked: str) -> None:
    with pytest.raises(OptionError) as caught:
        replayed(run(ran), asked, tmp_path / "replay")

    assert f"method {asked!r} works on uploads of kind {METHODS[asked].uploads!r}" in str(caught.value)
    assert f"of kind {METHODS[ran].uploads!r} are those of client-000" in str(caught.value)
    assert not (tmp_path / "replay").exists()


def test_job_of_a_method_of_classifiers_knows_no_other_models() -> None:
    settings = read_settings({**SETTINGS, "method": "fedens"})

    job = build_job(settings, open_split("digits", "test", image_size=settings.app.data.image_size), None)

    assert {kind_of(name) for name in job.builders} == {"classifier"}


@pytest.mark.parametrize("shape", [(13, 1, 1), (1, 1, 64), (1, 2, 2)])
@pytest.mark.parametrize("task", ["open-set", "prototypes"])
def test_examples_that_cannot_be_destroyed_or_viewed_are_refused(task: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(OptionError):
        uploaded_builders(task, 2, shape)


def test_a_task_that_a_client_does_not_know_is_refused() -> None:
    settings = read_settings(SETTINGS)
    node = Node.of({"partition-id": 0, "num-partitions": CLIENTS}, settings.app)

    with pytest.raises(UploadError, match=r"task is 'poetry': must be one of classifier, open-set, prototypes"):
        prepare_upload(settings.app, node, TrainRequest("", 1, 0, task="poetry"), {})


def test_a_checkpoint_is_sent_as_the_task_s_kind(tmp_path: Path) -> None:
    settings = read_settings({**SETTINGS, "client.checkpoint": str(tmp_path / "{partition}.pt")})
    torch.save({"weight": torch.zeros(1)}, tmp_path / "0.pt")
    node = Node.of({"partition-id": 0, "num-partitions": CLIENTS}, settings.app)

    trained, _ = prepare_upload(settings.app, node, TrainRequest("", 1, 0, task="open-set"), {})

    assert trained.facts.architecture == "mnist-cnn+unknown"


def test_client_keeps_its_whole_model_and_sends_the_task_s_part_again(tmp_path: Path) -> None:
    given = {**SETTINGS, **QUICK, "method": "fedcvae-ens", "client.state-dir": str(tmp_path)}
    settings, asked = read_settings(given), TrainRequest("a" * 32, 1, 0, task="cvae")
    node = Node.of({"partition-id": 0, "num-partitions": CLIENTS}, settings.app)
    _, first = prepare_upload(settings.app, node, asked, {})
    kept = KeptModel(str(tmp_path), asked.run_id, node.client, 1)
    whole = kept.load()
    _, again = prepare_upload(settings.app, node, asked, {})

    assert whole[1].keys() > {f"decoder.{key}" for key in first}
    assert first.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in first.items())
