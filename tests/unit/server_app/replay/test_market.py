from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import oneshot, replayed
from safetensors.torch import save_file
from torch import nn

from fl_app.models import build
from server_app.replay.imports import ImportRequest, import_checkpoints
from server_app.settings.build import held_out
from server_app.settings.read import read_settings
from strategies.core.errors import OneShotError, OptionError, UploadError
from strategies.core.seeds import seeded_torch
from strategies.run.run_folder import RunFolder

State = dict[str, torch.Tensor]
SETTINGS: dict[str, Any] = {"method": "fedens", "compute": "in-process", "device": "cpu", "threads": 1}
COUNTS = [[(7 * label + 13 * seed) % 50 + 1 for label in range(10)] for seed in range(3)]


def state_of(architecture: str, seed: int) -> State:
    with seeded_torch(seed):
        return build(architecture, num_classes=10, input_shape=(1, 16, 16)).state_dict()


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder of three checkpoints, each written in another way."""
    folder = tmp_path / "models"
    folder.mkdir()
    save_file(state_of("lenet5", 0), folder / "a.safetensors")
    torch.save(state_of("lenet5", 1), folder / "b.pt")
    torch.save({"state_dict": state_of("lenet5", 2), "epoch": 3}, folder / "c.pth")
    (folder / "README.md").write_text("Models from elsewhere.")
    return folder


@pytest.fixture
def imported(tmp_path: Path, models: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that imports the folder into ``market``."""

    def run(text: str | None = None, **how: Any) -> dict[str, Any]:
        map_file = tmp_path / "map.toml"
        if text is not None:
            map_file.write_text(text)
        lines: list[str] = how.pop("lines", [])
        given: dict[str, Any] = {
            "folder": models,
            "architecture": "lenet5",
            "settings": {**SETTINGS, **how.pop("settings", {})},
            "map_file": None if text is None else map_file,
            "out": tmp_path / "market",
        }
        return import_checkpoints(ImportRequest(**{**given, **how}), log=lines.append)

    return run


Import = Callable[..., dict[str, Any]]


def stored(result: dict[str, Any]) -> dict[str, State]:
    with RunFolder.open(Path(result["run_dir"]), write=False) as run:
        return {upload.client: upload.read() for upload in run.round(1).uploads()}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in expected.items())


def test_every_checkpoint_becomes_an_upload_with_its_own_weights(
    imported: Import, tmp_path: Path, models: Path
) -> None:
    result = imported()

    assert [upload["client"] for upload in result["uploads"]] == ["a", "b", "c"]
    assert (result["run_dir"], result["refused"]) == (str(tmp_path / "market"), 0)
    for seed, state in enumerate(stored(result).values()):
        assert_same(state, state_of("lenet5", seed))
    with RunFolder.open(Path(result["run_dir"]), write=False) as run:
        info, records = run.info, run.round(1).records()
    assert info["imported-from"] == str(models)
    assert info["imported-files"] == {"a": "a.safetensors", "b": "b.pt", "c": "c.pth"}
    assert (info["settings"]["model.name"], info["student"], info["input-shape"]) == ("lenet5", "lenet5", [1, 16, 16])
    assert all(r.facts.pretrained and r.facts.num_examples is None and r.facts.label_counts is None for r in records)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["market", "models"]


def test_a_replay_of_an_import_scores_the_checkpoints_as_they_are(imported: Import) -> None:
    result = imported()
    images = held_out(read_settings(SETTINGS))[0]
    members = [build("lenet5", num_classes=10, input_shape=(1, 16, 16)).eval() for _ in range(3)]
    for seed, member in enumerate(members):
        member.load_state_dict(state_of("lenet5", seed))

    table = {row["name"]: row["accuracy"] for row in replayed(result, "fedens")["table"]}

    class Together(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([member(x) for member in members]).mean(0)

    both = Together()
    both.register_parameter("device", nn.Parameter(torch.zeros(1)))
    assert {name: table[name] for name in "abc"} == dict(zip("abc", map(images.accuracy, members), strict=True))
    assert table["FedENS"] == images.accuracy(both)
    assert len({table[name] for name in "abc"}) == 3


def test_methods_that_need_label_counts_work_with_a_map_and_refuse_without(imported: Import, tmp_path: Path) -> None:
    names = ("a.safetensors", "b.pt", "c.pth")
    told = "".join(f'["{name}"]\nlabel-counts = {COUNTS[k]}\n' for k, name in enumerate(names))

    with pytest.raises(OptionError, match="needs label counts, which these clients did not send: a, b, c"):
        replayed(imported(), "label-count-ensemble")

    result = imported(told, out=tmp_path / "told")
    assert [upload["num_examples"] for upload in result["uploads"]] == [sum(COUNTS[k]) for k in range(3)]
    assert replayed(result, "label-count-ensemble")["uploads"] == 3


def test_a_map_gives_names_architectures_sizes_and_keys(imported: Import, models: Path) -> None:
    renamed = {f"backbone.net.{key}": value for key, value in state_of("mnist-cnn", 4).items()}
    torch.save(renamed, models / "b.pt")

    result = imported(
        '["b.pt"]\nname = "clinic-b"\narchitecture = "mnist-cnn"\nnum-examples = 600\n'
        'keys = { "backbone." = "wrong.", "backbone.net." = "" }\n["c.pth"]\nnum-examples = 7'
    )

    facts = [(u["client"], u["architecture"], u["num_examples"]) for u in result["uploads"]]
    assert facts == [("a", "lenet5", None), ("clinic-b", "mnist-cnn", 600), ("c", "lenet5", 7)]
    assert_same(stored(result)["clinic-b"], state_of("mnist-cnn", 4))


def test_prefixes_that_make_two_names_one_are_refused(imported: Import, models: Path) -> None:
    torch.save({"x.fc": torch.ones(1), "y.fc": torch.ones(1)}, models / "b.pt")

    with pytest.raises(UploadError, match=r"b.pt: tensors 'x.fc' and 'y.fc' both become 'fc'; must be one name"):
        imported('["b.pt".keys]\n"x." = ""\n"y." = ""')


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_precision_becomes_the_model_s(imported: Import, models: Path, dtype: torch.dtype) -> None:
    state = {key: value.to(dtype) for key, value in state_of("lenet5", 1).items()}
    torch.save({f"module.{key}": value for key, value in state.items()}, models / "b.pt")

    assert_same(stored(imported())["b"], {key: value.float() for key, value in state.items()})


def write(kind: str, path: Path) -> None:
    """Write a bad file."""
    state = state_of("lenet5", 1)
    weight = state["conv1.weight"]
    written: dict[str, Any] = {
        "malicious": {**state, "evil": Malicious(path.parent / "evil")},
        "module": nn.Linear(2, 2),
        "numbers": {"a": 1},
        "extra": {**state, "head.weight": torch.ones(1)},
        "missing": {key: value for key, value in state.items() if not key.startswith("conv")},
        "shape": {**state, "conv1.weight": weight[:1], "conv1.bias": torch.ones(3)},
        "whole": {**state, "conv1.weight": weight.long()},
        "sparse": {**state, "fc1.weight": state["fc1.weight"].to_sparse()},
        "expanded": {**state, "conv1.weight": torch.ones(1).expand(2**50)},
        "nan": {**state, "conv1.weight": weight * float("nan")},
        "overflow": {**state, "conv1.weight": weight.double() + 1e300},
    }
    if kind in written:
        torch.save(written[kind], path)
    elif kind == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    else:
        torch.save(state, path)
        path.write_bytes(path.read_bytes()[: -path.stat().st_size // 2])


FIT = "tensors do not fit architecture 'lenet5': "
BAD = {
    "malicious": "cannot be read as weights: it is a pickle that asks for 'posix.mkdir', which is not a tensor",
    "module": "cannot be read as weights: it is a pickle that asks for 'torch.nn.modules.linear.Linear'",
    "text": "cannot be read as weights: it is a pointer of Git LFS, 'git lfs pull' fetches the file itself: must be a ",
    "truncated": "cannot be read as weights: it is damaged, or torch.save did not write it: must be",
    "numbers": "holds dict in which 'a' is int: must be a state_dict, name -> tensor",
    "extra": f"{FIT}missing nothing; not expected head.weight",
    "missing": f"{FIT}missing conv1.bias, conv1.weight, conv2.bias, conv2.weight;",
    "shape": rf"{FIT}conv1.weight is float32\[1, .*\], expected is float32\[6, .*\], conv1.bias is float32\[3\], exp",
    "whole": rf"{FIT}conv1.weight is int64\[6, .*\], expected is float32\[6,",
    "sparse": rf"{FIT}fc1.weight is float32 and no dense tensor, expected is float32\[",
    "expanded": rf"{FIT}conv1.weight is float32\[1125899906842624\], expected is",
    "nan": "tensor 'conv1.weight' holds NaN or Inf: must be finite values",
    "overflow": "tensor 'conv1.weight' holds NaN or Inf: must be finite values",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_refuses_the_whole_import_in_one_line_and_leaves_nothing_behind(
    imported: Import, tmp_path: Path, models: Path, kind: str
) -> None:
    write(kind, models / "bad.pt")

    with pytest.raises(UploadError, match=f"bad.pt:? {BAD[kind]}") as error:
        imported()

    assert str(error.value).startswith(
        f"1 of 4 checkpoints in {models} are refused, so nothing is imported; --skip-bad"
    )
    assert list(tmp_path.iterdir()) == [models]
    assert not (models / "evil").exists()


def test_bad_files_when_skipped_are_left_out_and_logged(imported: Import, models: Path) -> None:
    write("malicious", models / "bad.pt")
    lines: list[str] = []

    result = imported(skip_bad=True, lines=lines)

    assert list(stored(result)) == ["a", "b", "c"]
    assert [(r["client"], r["file"]) for r in result["refusals"]] == [("bad", "bad.pt")]
    assert len(lines) == 1
    assert lines[0].startswith(f"left out: checkpoint {models / 'bad.pt'} cannot be read as weights: it is a pickle")
    with RunFolder.open(Path(result["run_dir"]), write=False) as run:
        assert [entry["client"] for entry in run.round(1).refused()] == ["bad"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "map .*map.toml is not TOML"),
        ('["x.pt"]', "map.toml names 'x.pt': must be the checkpoints a.safetensors, b.pt, c.pth$"),
        ("[b.pt]", r"map.toml names 'b': must be the checkpoints .*; names with dots are quoted, \[\"b.pt\"\]"),
        ('"b.pt" = 3', "map.toml: 'b.pt' is int: must be a table of facts"),
        ("keys = 3", "map.toml: 'keys' is int: must be a table of facts"),
        ('["b.pt"]\nnum_examples = 3', r"\[\"b.pt\"\]: has 'num_examples': must be name, architecture"),
        ('["b.pt"]\narchitecture = "lenet"', "architecture is 'lenet': must be lenet5, "),
        ('["b.pt"]\narchitecture = "cnn5"', "architecture is 'cnn5': must be lenet5, "),
        ('["b.pt"]\nname = "a b"', "name is 'a b': must match"),
        ('["b.pt"]\nname = "a"', "a.safetensors and b.pt both give the client name 'a': must be one file per name"),
        ('["b.pt"]\nnum-examples = 0', "num-examples is 0: must be a positive whole number"),
        ('["b.pt"]\nnum-examples = true', "num-examples is True: must be a positive whole number"),
        ('["b.pt"]\nnum-examples = "many"', "num-examples is 'many': must be a positive whole number"),
        ('["b.pt"]\nlabel-counts = [1, 2]', r"label-counts is \[1, 2\]: must be 10 whole numbers from 0"),
        ('["b.pt"]\nlabel-counts = [1,1,1,1,1,1,1,1,1,-1]', "label-counts is .*: must be 10 whole numbers from 0"),
        ('["b.pt"]\nnum-examples = 9\nlabel-counts = [1,1,1,1,1,1,1,1,1,1]', "label-counts sum to 10, but num-.* is 9"),
        ('["b.pt"]\nlabel-counts = [0,0,0,0,0,0,0,0,0,0]', "the sum of label-counts is 0: must be a positive"),
        ('["b.pt"]\nkeys = "x"', "keys is str: must be a table, old prefix -> new prefix"),
        ("[keys]\nnet.layers = ''", "keys has 'net' = dict: must be a text, .* prefixes with dots are quoted"),
    ],
)
def test_a_wrong_map_is_refused_in_one_line_whether_bad_files_are_skipped_or_not(
    imported: Import, tmp_path: Path, text: str, message: str
) -> None:
    for skip_bad in (False, True):
        with pytest.raises(OneShotError, match=message) as error:
            imported(text, skip_bad=skip_bad)
        assert str(tmp_path / "map.toml") in str(error.value) or "both give" in str(error.value)

    assert not (tmp_path / "market").exists()


@pytest.mark.parametrize(
    ("file", "client"), [("my model (1).v2.pt", "my-model-1-.v2"), ("_x.PTH", "x"), (f"{'y' * 70}.bin", "y" * 64)]
)
def test_a_client_s_name_is_the_file_s_made_to_fit(imported: Import, models: Path, file: str, client: str) -> None:
    torch.save(state_of("lenet5", 1), models / file)

    assert client in stored(imported())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "lenet"}, "--architecture is 'lenet': must be lenet5, "),
        ({"architecture": "cnn5"}, "'cnn5', which does not take examples of shape"),
        ({"settings": {"model.name": "mnist-cnn"}}, "'model.name' is 'mnist-cnn': must be that of --architecture, "),
        ({"settings": {"resume": "x"}}, "'resume' is 'x': must be empty"),
        ({"settings": {"data.name": "x"}}, "'data.name' is 'x'"),
    ],
)
def test_a_wrong_setting_is_refused(imported: Import, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        imported(**how)

    assert not (tmp_path / "market").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_checkpoint_is_in_memory_at_a_time_and_an_interrupt_leaves_nothing(
    imported: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    order: list[str] = []
    accept = RunFolder.round

    def interrupt(path: Path) -> State:
        order.append(path.name)
        if path.name == "c.pth":
            signal.raise_signal(number)
        with RunFolder.open(next(tmp_path.glob(".market.*.tmp")), write=False) as run:
            assert len(accept(run, 1).held()) == len(order) - 1
        return state_of("lenet5", 1)

    monkeypatch.setattr("server_app.replay.imports.read_checkpoint", interrupt)

    with pytest.raises(KeyboardInterrupt):
        imported()

    assert order == ["a.safetensors", "b.pt", "c.pth"]
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_the_command_prints_the_uploads_the_folder_and_the_next_command(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "market place"

    said = oneshot("import", models, "--architecture", "lenet5", "--run-config", "method=fedens", "--out", out)

    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert [line.split() for line in lines[:3]] == [[name, "lenet5", "0.17", "MiB"] for name in "abc"]
    assert lines[3:] == [
        "uploads      3 imported, 0 refused, 1 other files left out: README.md",
        f"run folder   {out}",
        f"next         oneshot replay '{out}' --method fedens",
    ]


@pytest.mark.parametrize("named", ["names", "numbers"])
def test_checkpoints_that_name_other_classes_are_refused_and_numbers_of_the_data_set_are_no_names(
    imported: Import, models: Path, named: str
) -> None:
    words = [f"digit {number}" for number in range(10)] if named == "names" else [str(k) for k in range(10)]
    torch.save({"model": state_of("lenet5", 1), "classes": words}, models / "b.pt")
    lines = list[str]()
    result = imported(lines=lines)
    assert len(result["uploads"]) == 3
    assert "a, c name no classes: taken to be those of the others, in their order" in lines
    assert replayed(result, "fedens")["status"] == "finished"
    torch.save({"model": state_of("lenet5", 2), "classes": words[::-1]}, models / "c.pth")
    line = f"c.pth: its classes differ from those of .*: class 0 is '{words[-1]}' here and '{words[0]}' there"
    with pytest.raises(UploadError, match=line):
        imported(out=models.parent / "second")
    torch.save({"model": state_of("lenet5", 2), "classes": ["ill", "well"]}, models / "c.pth")
    with pytest.raises(UploadError, match=r"c.pth: its classes differ from those of .*"):
        imported(out=models.parent / "third")


def test_files_with_the_weights_of_others_are_named(imported: Import, models: Path) -> None:
    torch.save(state_of("lenet5", 1), models / "b.pt")
    torch.save({"state_dict": state_of("lenet5", 1)}, models / "copy.ckpt")
    torch.save(state_of("lenet5", 2), models / "b-last.pt")
    lines = list[str]()
    imported(lines=lines)
    assert any(
        line.startswith(f"checkpoints in {models}: b-last.pt, b.pt look like states of one training") for line in lines
    )
    assert "the uploads of b, copy are equal: must be of clients that train on examples of their own" in lines
