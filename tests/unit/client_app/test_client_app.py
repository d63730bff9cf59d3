from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_fakes import RUN, Ask, image_folder, reply_of
from flower_fakes import equal
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from safetensors.torch import save_file

from client_app import work
from client_app.tasks import TASKS
from fl_app.config import DataConfig
from fl_app.data import open_data, open_split, partition
from fl_app.models import build, builders
from strategies.client import start_digest
from strategies.core.errors import UploadError
from strategies.core.facts import EXPECTED, Agreed, Agreement, read_agreement, weights_alone
from strategies.core.seeds import seeded_torch
from strategies.flower.messages import Request, read_reply
from strategies.uploads.checks import Signatures
from strategies.uploads.packed import ensemble_digest

CLIENTS = 4
SIGNATURES = Signatures(builders(10, (1, 16, 16)))


@pytest.fixture
def ask(in_a_run: None) -> Ask:
    """Return a function that asks a client once, as the server does, and returns its reply."""
    work.cached_split.cache_clear()  # pytest may give two tests a folder of one name

    def asked(
        *,
        server_round: int = 1,
        held: tuple[str, ...] = (),
        seed: int = 0,
        run_id: str = RUN,
        asks: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Message:
        request = Request(ArrayRecord(), {}, server_round, run_id, seed, held, asks or {})
        small = {"client__epochs": 1, "client__batch_size": 64, "seed": seed}
        return reply_of(request.message(9, MessageType.TRAIN).content, **{**small, **more})

    return asked


def never(*_: object, **__: object) -> None:
    raise AssertionError("the client works though it should not")


def replace_training(monkeypatch: pytest.MonkeyPatch, train: Callable[..., Any]) -> None:
    monkeypatch.setitem(TASKS, "classifier", replace(TASKS["classifier"], train=train))


def facts_of(reply: Message) -> ConfigRecord:
    return reply.content.config_records["upload"]


def state_of(reply: Message) -> dict[str, torch.Tensor]:
    return dict(reply.content.array_records["arrays"].to_torch_state_dict())


def own_labels(partition_id: int, **data: Any) -> np.ndarray[Any, Any]:
    labels = open_split("digits", "train").labels.numpy()
    parts = partition(labels, DataConfig(**data), num_clients=CLIENTS, num_classes=10, seed=0)
    return labels[parts[partition_id]]


def test_the_reply_is_one_that_the_server_accepts(ask: Ask) -> None:
    reply = ask()

    checked = read_reply(reply.content, SIGNATURES, num_classes=10, max_bytes=2**20, sender="node-9")
    labels = own_labels(1)
    assert (checked.facts.client, checked.facts.architecture) == ("client-001", "lenet5")
    assert checked.facts.num_examples == len(labels)
    assert checked.facts.label_counts == tuple(np.bincount(labels, minlength=10).tolist())
    assert not checked.facts.pretrained
    assert not checked.held
    assert checked.metrics.keys() == {"train-loss", "train-accuracy"}
    assert 0.0 <= checked.metrics["train-accuracy"] <= 1.0
    assert set(reply.content) == {"arrays", "metrics", "upload"}
    with seeded_torch(0, "init", "lenet5"):
        start = start_digest(build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict())
    other = facts_of(ask(node={"partition-id": 3, "num-partitions": CLIENTS}))
    assert checked.facts.start == other["start"] == start


@pytest.mark.parametrize(("sums", "names"), [("fisher", {"fisher:conv1.weight"}), ("gram", {"gram:fc1"})])
def test_what_is_measured_for_a_merge_travels_beside_the_weights(ask: Ask, sums: str, names: set[str]) -> None:
    reply = ask(asks={"sums": sums})

    checked = read_reply(reply.content, SIGNATURES, num_classes=10, max_bytes=2**23, sender="node-9")
    assert equal(weights_alone(checked.state), state_of(ask(run_id="1" * 32)))
    measured = checked.state.keys() - weights_alone(checked.state).keys()
    assert names & measured
    assert all(name.startswith(f"{sums}:") for name in measured)
    assert "sums is 'other': must be 'fisher' or 'gram'" in str(facts_of(ask(asks={"sums": "other"}, run_id="2" * 32)))


def table(root: Path, classes: str, mean: int = 50) -> Path:
    root.mkdir()
    (root / "schema.toml").write_text(f"classes = {classes}\n[columns.age]\nmean = {mean}\n[columns.sugar]\n")
    for half in ("train", "test"):
        (root / f"{half}.csv").write_text("age,sugar,outcome\n40,1,ill\n50,2,healthy\n60,3,ill\n")
    return root


IMAGES: dict[str, Any] = {"name": "imagefolder", "image_size": 32}
TABLE: dict[str, Any] = {"name": "csv", "label": "outcome", "partition": "iid"}
IN_ORDER = '["healthy", "ill"]'
ORDER = ", the same names in another order"


@pytest.mark.parametrize(
    ("data", "theirs", "line"),
    [
        (IMAGES, (("ant", "cat"),), "class 0 is 'ant' here and 'cat' there"),
        (IMAGES, (("cat", "dog"),), ""),
        (TABLE, ('["ill", "healthy"]', 50), f"class 0 is 'ill' here and 'healthy' there{ORDER}"),
        (TABLE, (IN_ORDER, 60), "line 1 is 'age: mean 60, deviation 1' here and 'age: mean 50, deviation 1' there"),
        (TABLE, (IN_ORDER, 50), ""),
    ],
)
@pytest.mark.parametrize("policy", [{}, {"label-counts": "none"}], ids=["names", "digest"])
def test_a_node_with_other_classes_or_columns_is_refused_and_before_it_trains_if_the_request_names_them(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], theirs: Any, line: str, policy: Any
) -> None:
    write, ours = (image_folder, (("cat", "dog"),)) if data is IMAGES else (table, (IN_ORDER, 50))
    node, server = write(tmp_path / "node", *theirs), write(tmp_path / "server", *ours)
    agreement = open_data(DataConfig(**data, root=str(server)), "test").agreement
    settings = {f"data__{key}": value for key, value in data.items()}
    settings |= {"model__name": "lenet5" if data is IMAGES else "mlp"}
    asked = partial(ask, node={"client": "b", "data-root": str(node), **policy}, **settings)
    said = facts_of(asked())
    assert ("classes" in said, "classes-sha256" in said) == (not policy, True)
    line = "and the names are not sent" if policy and line else line
    with pytest.raises(UploadError, match=line) if line else nullcontext():
        Agreed(agreement).check(read_agreement(said))
    if line:
        replace_training(monkeypatch, never)
    for way in [{}, {"iterative": True}][: 1 + bool(line)]:
        told = facts_of(asked(run_id="1" * 32, asks={**agreement.to_record(EXPECTED), **way}))
        assert line in told.get("error", "")
        assert ("error" in told) == bool(line)


@pytest.mark.parametrize("kind", ["fens", "evaluate", "head", "fusefl"])
def test_later_questions_too_are_refused_where_the_classes_are_others(ask: Ask, tmp_path: Path, kind: str) -> None:
    """A node's folder may have changed since its upload, or another node may answer under its name."""
    named = {"data__name": "imagefolder", "data__image_size": 32, "model__name": "lenet5"}
    facts = {"client": "b", "data-root": str(image_folder(tmp_path / "node", ("ant", "cat")))}
    ask(node=facts, asks={"task": "block" if kind == "fusefl" else "classifier"}, **named)
    said: dict[str, Any] = {
        "run-id": RUN, "seed": 0, "holdout": 0.0, "per-class": False, "num-classes": 2, "test-share": 0.5, "stage": 2,
        "adapter": "conv", "architecture": "lenet5", "step": "offer", "precision": "float32", "sizes": [1],
        "members": ["0" * 64], "ensemble": ensemble_digest(["0" * 64]),
    }  # fmt: skip
    weights = ArrayRecord(
        build("lenet5", num_classes=2, input_shape=(3, 32, 32)).state_dict() if kind == "head" else {}
    )

    def error(names: tuple[str, ...]) -> str:
        content = RecordDict({"config": ConfigRecord({**said, **Agreement.of(names).to_record(EXPECTED)})})
        content["arrays"] = weights
        reply = reply_of(content, f"train.{kind}", node=facts, client__batch_size=64, **named)
        return str(reply.content.config_records["answer"].get("error", ""))

    assert "class 0 is 'ant' here and 'cat' there, the same names in another order" in error(("cat", "ant"))
    assert " here and " not in error(("ant", "cat"))


def test_clients_when_they_are_several_hold_the_whole_training_set_once(ask: Ask) -> None:
    counts = [
        facts_of(ask(node={"partition-id": k, "num-partitions": CLIENTS}, data__partition="iid"))["label-counts"]
        for k in range(CLIENTS)
    ]

    total = np.sum(counts, axis=0)
    assert total.tolist() == torch.bincount(open_split("digits", "train").labels, minlength=10).tolist()


@pytest.mark.parametrize("task", [name for name in TASKS if name != "statistics"])  # sums draw nothing
def test_training_when_repeated_gives_the_same_bits_and_other_seeds_clients_and_rounds_others(
    ask: Ask, tmp_path: Path, task: str
) -> None:
    def fresh(name: str, **how: Any) -> dict[str, torch.Tensor]:
        return state_of(ask(client__state_dir=str(tmp_path / name), asks={"task": task}, data__limit=400, **how))

    first = fresh("a")

    assert equal(first, fresh("b"))
    assert not equal(first, fresh("c", seed=1))
    assert not equal(first, fresh("d", server_round=2))
    assert not equal(first, fresh("e", node={"partition-id": 2, "num-partitions": CLIENTS}))


def test_an_upload_that_the_server_holds_is_answered_at_once(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_training(monkeypatch, never)
    monkeypatch.setattr(work, "open_data", never)
    monkeypatch.setattr(work.AppConfig, "from_settings", never)

    reply = ask(held=("client-000", "client-001"))

    assert set(reply.content) == {"upload"}
    assert dict(facts_of(reply)) == {"client": "client-001", "held": True}


def test_a_client_when_asked_again_sends_its_kept_upload_and_trains_nothing(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask()
    replace_training(monkeypatch, never)

    again = ask(held=("client-000",))

    assert equal(state_of(first), state_of(again))
    assert dict(facts_of(first)) == dict(facts_of(again))
    assert dict(first.content.metric_records["metrics"]) == dict(again.content.metric_records["metrics"])


def test_a_client_with_an_invalid_name_says_so_and_trains_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_training(monkeypatch, never)

    reply = ask(node={"client": "../alice", "partition-id": 1, "num-partitions": CLIENTS})

    assert str(facts_of(reply)["error"]).startswith("client is '../alice': must be a name that matches [A-Za-z0-9]")


def test_a_client_when_its_disk_refuses_still_sends_its_model(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    reply = ask(client__state_dir=str(tmp_path / "file"))

    assert len(state_of(reply)) == 10


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"node": {"partition-id": 4, "num-partitions": 4}}, "partition-id is 4: must be 0 to 3"),
        ({"node": {"partition-id": 0, "num-partitions": 0}}, "num-partitions is 0: must be at least 1"),
        ({"node": {"partition-id": -1, "num-partitions": 4}}, "partition-id is -1: must be 0 to 3"),
        ({"model__name": "cnn5"}, "architecture 'cnn5' cannot take examples of shape (1, 16, 16)"),
        ({"client__checkpoint": "/nowhere/{partition}.pt"}, "checkpoint /nowhere/1.pt does not exist"),
        ({"client__checkpoint": "{x}"}, "setting 'client.checkpoint' is '{x}'"),
        ({"client__checkpoint": "{client:9999999999}"}, "'client.checkpoint' is '{client:9999999999}'"),
        ({"client__epochs": 0}, "setting 'client.epochs' is 0"),
        ({"data__name": "imagefolder", "data__image_size": 8, "data__root": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_client_that_cannot_work_says_why_in_one_line(ask: Ask, how: dict[str, Any], reason: str) -> None:
    reply = ask(**how)

    assert not reply.has_error()
    assert set(reply.content) == {"upload"}
    facts = facts_of(reply)
    assert str(facts["client"]).startswith("client-")
    assert reason in str(facts["error"])
    assert "\n" not in str(facts["error"])


SIGNATURES_STATE = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict()


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_a_pretrained_client_in_simulation_uploads_its_file_and_trains_nothing(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    replace_training(monkeypatch, never)
    path = tmp_path / f"trained-1{ending}"
    state = {key: torch.full_like(value, 0.5) for key, value in SIGNATURES_STATE.items()}
    (save_file if ending == ".safetensors" else torch.save)(state, path)

    reply = ask(client__checkpoint=str(tmp_path / f"trained-{{partition}}{ending}"))

    checked = read_reply(reply.content, SIGNATURES, num_classes=10, max_bytes=2**20, sender="node-9")
    assert checked.facts.pretrained
    assert checked.facts.num_examples == len(own_labels(1))
    assert checked.facts.label_counts is not None
    assert checked.metrics == {}
    assert equal(state_of(reply), state)


def test_a_pretrained_client_whose_file_names_another_order_of_classes_sends_nothing(ask: Ask, tmp_path: Path) -> None:
    words = [str(number) for number in range(10)]
    torch.save({"state_dict": SIGNATURES_STATE, "classes": words[::-1]}, tmp_path / "a.pt")
    reply = ask(client__checkpoint=str(tmp_path / "a.pt"), asks=Agreement.of(words).to_record(EXPECTED))
    assert "class 0 is '9' here and '0' there, the same names in another order" in str(facts_of(reply)["error"])
    assert not reply.content.array_records


@pytest.mark.parametrize("value", [torch.ones(2).bfloat16(), torch.eye(3).to_sparse()], ids=["bfloat16", "sparse"])
def test_a_tensor_that_no_upload_can_carry_is_refused_by_name(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"fine": torch.ones(2), "fc.weight": value}, tmp_path / "model.pt")

    with pytest.raises(UploadError, match=r"model.pt, tensor 'fc.weight' is torch"):
        work.load_checkpoint(tmp_path / "model.pt")
