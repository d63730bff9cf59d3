"""A server that chooses every setting and every word of a request, against this app's client on a deployed node."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_fakes import image_folder, reply_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from safetensors.torch import load_file, save_file

from client_app import app as client_app
from client_app import work
from client_app.tasks import TASKS
from fl_app.ledger import Ledger
from strategies.core import checkpoints
from strategies.core.errors import UploadError
from strategies.core.options import Scalar
from strategies.uploads.packed import ensemble_digest, from_wire

IMAGES: dict[str, Scalar] = {"data__name": "imagefolder", "data__image_size": 8, "model__name": "mlp"}
PRIVATE = {"privacy.epsilon": 8.0, "client.share-label-counts": False, "client.batch-size": 64, "client.steps": 1}
RUNS = [f"{number:032x}" for number in range(9)]


WATCHED: list[list[str]] = []  # the paths that this process opens or lists, while a test watches


def watch(event: str, given: tuple[Any, ...]) -> None:
    """Note a path, as Python's own events tell it."""
    if WATCHED and event in ("open", "os.listdir", "os.scandir", "os.remove", "shutil.rmtree"):
        WATCHED[-1].append(str(given[0]))


sys.addaudithook(watch)


@dataclass(frozen=True)
class Hospital:
    """A node with a config of its own, and private files beside it."""

    folder: Path
    own: dict[str, Any]

    def asked(
        self, said: dict[str, Any], settings: dict[str, Scalar], *, kind: str = MessageType.TRAIN, **arrays: Array
    ) -> Message:
        """Return the client's reply to a request of any content under any settings."""
        content = RecordDict({"config": ConfigRecord(said), "arrays": ArrayRecord(arrays)})
        return reply_of(content, kind, node=self.own, **settings)

    def train(self, run_id: str = RUNS[0], **settings: Scalar) -> Message:
        """Return the reply to a request for an upload."""
        said = {"run-id": run_id, "server-round": 1, "seed": 0}
        return self.asked(said, {"client.batch-size": 64, "client.steps": 1, **settings})

    def with_images(self, *halves: str) -> str:
        """Write images of two classes into the folder that it may read, and return its path."""
        return str(image_folder(self.folder / "open", ("ill", "well"), images=1, halves=halves))


Nodes = Callable[..., Hospital]  # a function from the config to its node


@pytest.fixture
def hospital(in_a_run: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    for name in ("secret", "open", "state"):
        (tmp_path / name).mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "secret" / "model.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "open" / "model.safetensors")
    (tmp_path / "secret" / "noise.safetensors").write_bytes(b"no weights")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    work.cached_split.cache_clear()
    monkeypatch.setattr(checkpoints, "load_file", seen_load)

    def made(**own: Any) -> Hospital:
        named = {key.replace("_", "-"): value for key, value in own.items()}
        facts = {"client": "hospital-a", "partition-id": 1, "num-partitions": 4, "state-dir": str(tmp_path / "state")}
        return Hospital(tmp_path, {**facts, "read": str(tmp_path / "open"), **named})

    return made


def seen_load(path: Path) -> dict[str, torch.Tensor]:
    """Load a file as safetensors does, with the event that its native code leaves out."""
    path.open("rb").close()
    return load_file(path)


def facts_of(reply: Message) -> dict[str, Any]:
    (facts,) = reply.content.config_records.values()  # of an upload, or of an answer to a later question
    return dict(facts)


def error_of(reply: Message) -> str:
    assert not any(reply.content.array_records.values())
    return str(facts_of(reply)["error"])


def opened_while(action: Callable[[], Message | None], below: Path) -> tuple[set[str], Message]:
    """Return the paths below a folder that an action touches, with the links resolved, and the action's reply."""
    WATCHED.append([])
    try:
        reply = action()
    finally:
        found = WATCHED.pop()
    resolved = {path: Path(path).resolve() for path in found if path.startswith("/")}
    return {path for path, real in resolved.items() if real.is_relative_to(below)}, reply


def test_no_run_keeps_more_features_on_the_disk_than_the_node_permits(
    hospital: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[tuple[Path, float]] = []
    monkeypatch.setattr(work, "FeatureCache", lambda *given: caches.append(given))
    node = hospital(max_cache_mib=0.5)

    assert "error" not in facts_of(node.train(features__cache_mib=1e9))

    assert caches == [(node.folder / "state" / "features", 0.5)]


CHECKPOINTS = (
    "secret/model.safetensors", "secret/noise.safetensors", "secret/absent.safetensors", "secret",
    "open/link/model.safetensors", "open/../secret/model.safetensors", "opened/model.safetensors",
)  # fmt: skip
OUTSIDE = "setting 'client.checkpoint' is '{}': must be in a folder of this node's 'read'"
UNREAD = "data set 'imagefolder' cannot be read on this node; its log has the reason"


@pytest.mark.parametrize(
    ("key", "path", "line"),
    [
        *(("client__checkpoint", path, OUTSIDE) for path in CHECKPOINTS),
        *(("data__root", path, UNREAD) for path in ("secret", "open", "open/link", "nowhere")),
    ],
)
def test_nothing_outside_the_node_s_folders_is_touched_and_all_paths_get_the_same_line(
    hospital: Nodes, key: str, path: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = hospital()
    monkeypatch.setenv("ONESHOT_DATA", str(node.folder / "data"))
    named = f"{node.folder}/{path}"
    data = IMAGES if key == "data__root" else {}

    touched, reply = opened_while(lambda: node.train(**data, **{key: named}), node.folder / "secret")

    assert touched == set()
    assert error_of(reply) == line.format(named)


@pytest.mark.parametrize("kind", [MessageType.TRAIN, "train.fens", "train.fusefl", MessageType.QUERY])
@pytest.mark.parametrize("error", [PermissionError(13, "denied", "/srv/patients"), KeyError("/srv/patients")])
def test_the_text_of_an_unexpected_error_stays_on_a_deployed_node(
    hospital: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    error: Exception,
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(client_app, "node_facts", broken)
    node = hospital()

    reply = node.asked({}, {}, kind=kind)

    assert reply.has_error()
    assert reply.error.code == 2
    assert reply.error.reason == f"{type(error).__name__} in the client's app; the node's log says more"
    assert "/srv/patients" in caplog.text
    simulated = replace(node, own={"partition-id": 1, "num-partitions": 4})
    with pytest.raises(type(error), match="/srv/patients"):
        simulated.asked({}, {}, kind=kind)


def test_a_checkpoint_in_the_node_s_folders_is_sent_and_the_error_of_one_stays_on_the_node(
    hospital: Nodes,
) -> None:
    node = hospital()
    (node.folder / "open" / "noise.safetensors").write_bytes(b"no weights")

    files = [f"{node.folder}/open/{name}.safetensors" for name in ("absent", "noise")]
    lines = {error_of(node.train(client__checkpoint=file)) for file in files}
    good = f"{node.folder}/open/model.safetensors"
    touched, reply = opened_while(lambda: node.train(client__checkpoint=good), node.folder / "open")

    assert touched == {good}  # so the watch sees an opened file
    assert reply.content.array_records["arrays"].keys() == {"w"}
    assert lines == {"the checkpoint cannot be read on this node; its log has the reason"}


@pytest.mark.parametrize("words", [["ill", "well"], ["well", "ill"]])
def test_a_checkpoint_that_numbers_the_node_s_classes_otherwise_is_not_sent(
    hospital: Nodes, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    node = hospital(partition_id=0, num_partitions=1)
    root = node.with_images("train")
    torch.save({"state_dict": {"w": torch.ones(2)}, "classes": words}, file := node.folder / "open" / "named.pt")
    reply = node.train(**IMAGES, data__root=root, data__partition="iid", client__checkpoint=f"{file}")
    if words == ["ill", "well"]:
        assert reply.content.array_records["arrays"].keys() == {"w"}
    else:
        assert error_of(reply) == "the checkpoint cannot be read on this node; its log has the reason"
        assert "differ from those of this node's data: class 0 is 'well' here and 'ill' there" in caplog.text


@pytest.mark.parametrize("file", ["train/ill/Jane_Doe_1961.png", "schema.toml"])
def test_a_damaged_file_of_the_node_s_own_data_is_not_named(hospital: Nodes, file: str) -> None:
    node = hospital(partition_id=0, num_partitions=1)
    root = node.with_images("train", "test")
    (node.folder / "open" / file).write_text('secret = "Jane Doe"')
    table: dict[str, Scalar] = {"data__name": "csv", "data__image_size": 0, "data__label": "y"}
    given = {**IMAGES, **(table if file == "schema.toml" else {"data__partition": "iid"})}

    reply = node.train(**given, data__root=root)

    assert error_of(reply) == f"data set {given['data__name']!r} cannot be read on this node; its log has the reason"


def test_no_folder_of_the_server_s_choice_is_written_or_emptied(hospital: Nodes) -> None:
    node = hospital()
    elsewhere = node.folder / "secret" / "archive"
    for run in RUNS * 3:  # as many as a client's folder would not hold
        (elsewhere / run).mkdir(parents=True, exist_ok=True)
        (elsewhere / run / "thesis.txt").write_text("mine")

    reply = node.train(client__state_dir=str(elsewhere))

    assert "error" not in facts_of(reply)
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(set(RUNS))
    assert (node.folder / "state" / RUNS[0] / "hospital-a-1.safetensors").exists()


def test_uploads_of_made_up_runs_never_spend_more_than_the_ledger_allows(
    hospital: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(TASKS["classifier"], train_privately=lambda *given: given[-1].epsilon)
    monkeypatch.setattr("client_app.tasks.TASKS", {**TASKS, "classifier": quick})  # the noise costs seconds
    node = hospital(max_epsilon=20.0)
    sent = 0.0

    for number, epsilon in enumerate((8.0, 8.0, 8.0, 3.0, 2.0, 1.0, 1000.0)):
        settings = {**PRIVATE, "privacy.epsilon": epsilon}
        for _ in range(2):  # asked twice, the same model is sent
            reply = node.asked({"run-id": RUNS[number], "seed": number}, settings)
            assert reply.content.metric_records.get("metrics", {}).keys() <= {"num-examples", "epsilon"}
        sent += 0.0 if "error" in facts_of(reply) else epsilon

    assert sent == Ledger.of(node.folder / "state", "hospital-a").spent()[0] == 20.0
    assert "must be at most 0 on this node" in error_of(node.asked({"run-id": "f" * 32}, PRIVATE))


def test_nothing_without_privacy_leaves_a_node_with_a_budget(hospital: Nodes) -> None:
    node = hospital(max_epsilon=20.0)

    assert "'privacy.epsilon' is 0: must be above 0 on this node" in error_of(node.train())
    assert "must be above 0" in error_of(node.asked({"iterative": "fedavg"}, {}))
    file = f"{node.folder}/open/model.safetensors"  # which a node without a budget would send
    assert "must be above 0" in error_of(node.train(client__checkpoint=file))
    assert "must be above 0" in error_of(node.asked({"step": "votes", "run-id": RUNS[0]}, {}, kind="train.fens"))
    assert Ledger.of(node.folder / "state", "hospital-a").spent() == (0.0, 0.0)


@pytest.mark.parametrize(("key", "value"), [("limit", 100), ("proxy", 0.2)])
def test_no_private_upload_is_of_a_drawn_part_of_the_examples(hospital: Nodes, key: str, value: float) -> None:
    node = hospital(max_epsilon=20.0)

    reply = node.asked({"run-id": RUNS[0], "seed": 0}, {**PRIVATE, f"data.{key}": value})

    line = f"setting 'data.{key}' is {value:g}: must be 0 with 'privacy.epsilon' on a deployed node"
    assert error_of(reply) == line
    assert Ledger.of(node.folder / "state", "hospital-a").spent() == (0.0, 0.0)


@pytest.mark.parametrize("told", ["presence", "none"])
def test_label_counts_are_within_the_node_s_policy_whatever_the_server_sets(hospital: Nodes, told: str) -> None:
    node = hospital(label_counts=told)

    facts = facts_of(node.train(client__share_label_counts=True, client__label_counts_as="numbers"))

    assert ("label-counts" in facts) == (told == "presence")
    if told == "presence":
        assert np.ptp([count for count in facts["label-counts"] if count]) <= 1


def test_a_training_by_a_function_which_adds_no_noise_is_refused_in_a_private_run(
    hospital: Nodes,
) -> None:
    asked = {**PRIVATE, "model.train": "mine:train"}

    error = error_of(hospital(max_epsilon=20.0).asked({"run-id": RUNS[0], "seed": 0}, asked))

    assert "a training by 'model.train'" in error


@pytest.mark.parametrize("told", ["presence", "none"])
def test_sums_and_votes_which_hold_label_counts_are_not_sent_by_a_node_that_tells_no_numbers(
    hospital: Nodes, told: str
) -> None:
    node, asked = hospital(label_counts=told), {"task": "statistics", "run-id": RUNS[0], "seed": 0}
    features: dict[str, Scalar] = {"features.backbone": "torchvision:resnet18", "client.steps": 1}
    line = "this client does not share its examples per class, which are part of"

    for settings in (features, {**features, "client.checkpoint": f"{node.folder}/open/model.safetensors"}):
        assert error_of(node.asked(asked, settings)) == f"{line} sums of features: needs 'privacy.epsilon' above 0"
    assert f"{line} votes" in fens_errors(node, step="votes")[-1]


@pytest.mark.parametrize("kind", ["backdoor", "claim", "scale"])
def test_no_node_with_a_config_of_its_own_plays_an_attacker(hospital: Nodes, kind: str) -> None:
    node = hospital()

    reply = node.train(attack__kind=kind, attack__clients="hospital-a")

    line = f"setting 'attack.kind' is {kind!r}, and 'attack.clients' names this client: must be 'none' for a node with "
    assert error_of(reply) == line + "a config of its own"
    assert "error" not in facts_of(node.train(attack__kind=kind, attack__clients="hospital-b"))


def test_no_architecture_beside_the_permitted_ones_is_trained_or_built(hospital: Nodes) -> None:
    node = hospital(architectures="lenet5, cnn5", max_ensemble_mib=1.0)

    line = "architecture 'resnet34' is not permitted on this node: must be one of lenet5, cnn5"
    assert error_of(node.train(model__name="resnet34")) == line
    assert "error" not in facts_of(node.train(RUNS[1]))

    for announced, arrays, line in (
        (1, 8, "architecture 'resnet34' is not permitted on this node"),
        (1, 2**21, "the ensemble is 2.0 MiB: must be at most 1 MiB on this node"),
        (2**21, 8, "the ensemble is 2.0 MiB: must be at most 1 MiB on this node"),
    ):
        assert line in next(filter(None, fens_errors(node, announced=announced, arrived=arrays)))


def fens_errors(node: Hospital, *, announced: int = 1, arrived: int = 8, step: str = "ensemble") -> list[str]:
    """Return the client's errors about an ensemble of one ResNet-34: offered with one size, sent with another."""
    from strategies.uploads.packed import PackedMember

    values = np.zeros(arrived, np.uint8)
    member = PackedMember("resnet34", "float32", {"w": values}).digest
    said = {
        "run-id": RUNS[0], "seed": 0, "holdout": 0.1, "per-class": False, "num-classes": 10, "precision": "float32",
        "ensemble": ensemble_digest([member]), "members": [member], "sizes": [announced], "architectures": ["resnet34"],
    }  # fmt: skip
    errors = []
    for asked, arrays in (("offer", {}), (step, {"0/w": values})):
        sent = {key: Array(value) for key, value in arrays.items()}
        reply = node.asked({**said, "step": asked}, {}, kind="train.fens", **sent)
        errors.append(str(facts_of(reply).get("error", "")))
    return errors


NOT_NUMBERS = (
    ("seed", "x"), ("seed", [1, 2]), ("server-round", float("inf")), ("server-round", "9" * 5000), ("holdout", "x"),
    ("holdout", float("nan")),
)  # fmt: skip


# What is asked -> the message's type, and the words by which the client knows the question.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "upload": ("train", {}), "rounds": ("train", {"iterative": "fedavg"}), "fusefl": ("train.fusefl", {"stage": 2}),
    "fens": ("train.fens", {}), "query": ("query", {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "key", "value"),
    [
        *((asked, *wrong) for asked, wrong in product(("upload", "rounds", "fusefl"), NOT_NUMBERS)),
        ("rounds", "lr-factor", "x"),
        ("rounds", "last-round", "x"),
    ],
)
def test_a_word_in_place_of_a_number_is_refused_in_one_line(hospital: Nodes, asked: str, key: str, value: Any) -> None:
    kind, words = ASKED[asked]

    error = error_of(hospital().asked({"run-id": RUNS[0], **words, key: value}, {}, kind=kind))

    assert error.startswith(f"the server's {key} is {value!r:.80}: must be a ")


def npy(shape: str, dtype: str = "<f4") -> bytes:
    """Return a file of numpy's with this header, and 64 bytes of values."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "data", [b"junk", b"", archive(), npy("((("), npy("(3,)", "|O"), npy(f"({2**40},)"), npy("(-4,)")]
)
@pytest.mark.parametrize("asked", ["upload", "rounds", "fusefl", "fens"])
def test_bytes_that_are_no_array_are_refused_in_one_line(hospital: Nodes, asked: str, data: bytes) -> None:
    kind, words = ASKED[asked]

    reply = hospital().asked(
        {"run-id": RUNS[0], **words}, {}, kind=kind, w=Array("float32", (3,), "numpy.ndarray", data)
    )

    assert error_of(reply).startswith("the server's array 'w' cannot be read: ")


@pytest.mark.parametrize("asked", ["upload", "fens", "fusefl", "query"])
def test_a_setting_that_no_deployed_node_takes_is_refused_in_one_line_whatever_is_asked(
    hospital: Nodes, asked: str
) -> None:
    kind, words = ASKED[asked]

    reply = hospital().asked({"run-id": RUNS[0], **words}, {"client.nodes": "x"}, kind=kind)

    assert facts_of(reply)["client"] == "hospital-a"
    assert error_of(reply).startswith("setting 'client.nodes' is 'x': must be '' outside `oneshot run`")


@pytest.mark.parametrize(("layers", "bounds"), [
    (["net"], [0.0, float("nan")]), (["net"], [-float("inf"), 1.0]), ([1], [0.0, 1.0]), (["a", "a"], [0.0, 1.0] * 2),
])  # fmt: skip
def test_ranges_of_a_member_that_are_no_names_and_finite_numbers_are_refused(
    layers: list[Any], bounds: list[float]
) -> None:
    arrays = {"0/<ranges>": np.array(bounds, np.float32).reshape(-1, 2)}

    with pytest.raises(UploadError, match="member 0 of the ensemble: its ranges"):
        from_wire(0, arrays, {"layers-0": layers}, architecture="lenet5", precision="int8")


WORDS = ("../secret/model.safetensors", "/secret", "~/", "{client}", "{partition}", "open/link", "open", "0" * 32, "")
KEYS = ("client.checkpoint", "data.root", "client.state-dir", "client.nodes", "uploads", "resume", "run-dir")


@pytest.mark.slow
def test_any_combination_of_paths_in_the_settings_touches_nothing_beside_the_node_s_folders(
    hospital: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = hospital(max_epsilon=20.0)
    monkeypatch.setenv("ONESHOT_DATA", str(node.folder / "data"))

    def ask_all() -> None:
        for (key, other), word in product(combinations(KEYS, 2), WORDS):
            path = f"{node.folder}/{word}".replace("//", "/")
            for name in ("digits", "imagefolder"):
                settings = {**PRIVATE, "data.name": name, "data.image-size": 8 if name != "digits" else 0}
                node.asked({"run-id": RUNS[0]}, {**settings, key: path, other: path})

    assert opened_while(ask_all, node.folder / "secret")[0] == set()
    assert Ledger.of(node.folder / "state", "hospital-a").spent()[0] <= 20.0
