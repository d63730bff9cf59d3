from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import equal
from safetensors.torch import save_file
from torch import nn

from strategies.core.checkpoints import read_checkpoint, read_classes, same_training_notes
from strategies.core.errors import UploadError
from strategies.core.scan import LOG

STATE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.steps": torch.tensor(7)}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict", "net"])
def test_a_training_script_s_checkpoint_is_its_state_dict(tmp_path: Path, wrapper: str | None, prefix: str) -> None:
    state: dict[str, Any] = {prefix + key: value for key, value in STATE.items()}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1).state_dict()
    torch.save(state if wrapper is None else {"optimizer": optimizer, wrapper: state, "epoch": 3}, tmp_path / "a.pt")

    assert equal(read_checkpoint(tmp_path / "a.pt"), STATE)


@pytest.mark.parametrize(
    ("names", "of_one"),
    [
        (["best.pt", "last.pt"], "best.pt, last.pt"),
        (["checkpoint-100", "checkpoint-200"], "checkpoint-100, checkpoint-200"),
        (["epoch=3-val_loss=0.25.ckpt", "last-v1.ckpt"], "epoch=3-val_loss=0.25.ckpt, last-v1.ckpt"),
        (["checkpoint.pth.tar", "model_best.pth.tar"], "checkpoint.pth.tar, model_best.pth.tar"),
        (["a_best.pt", "a_last.pt", "b_best.pt"], "a_best.pt, a_last.pt"),
        (["client-1.pt", "client-2.pt", "client-10.pt"], ""),
        (["client1_best.pt", "client2_best.pt"], ""),
        (["north_epoch_10.pth", "south_epoch_12.pth"], ""),
        (["client=1-epoch=3.ckpt", "client=2-epoch=3.ckpt"], ""),
        (["model.pt", "net.pt"], ""),
        (["日本.pt", "中国.pt", "best.pt"], ""),
    ],
)
def test_the_states_of_one_training_are_told_by_their_names(names: list[str], of_one: str) -> None:
    notes = same_training_notes(Path("models") / name for name in names)
    assert [note.partition(" look like states of one training")[0] for note in notes] == [of_one] * bool(of_one)
    assert not same_training_notes(Path(f"client-{number}") / name for number, name in enumerate(names))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"net_state_dict": STATE, "rng_state": {"cpu": torch.ones(2)}, "epoch": 3}, ""),
        ({"ema": STATE}, ""),
        ({"model": STATE, "model_ema": {"fc.weight": torch.zeros(2, 3)}}, "the model is that under 'model'; left out"),
        ({"state_dict": {"model": STATE, "swa": {"fc.weight": torch.zeros(1)}}}, "under 'model'; left out are 'swa'"),
        ({"state_dict": STATE, "best_state_dict": {"fc.weight": torch.zeros(2, 3)}}, "left out are 'best_state_dict'"),
    ],
)
def test_the_one_model_of_a_checkpoint_is_found_and_what_is_left_out_is_said(
    tmp_path: Path,
    content: dict[str, Any],
    line: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    torch.save(content, tmp_path / "a.pt")
    with caplog.at_level("WARNING"):
        assert equal(read_checkpoint(tmp_path / "a.pt"), STATE)
    assert (line in caplog.text) if line else not caplog.text


@pytest.mark.parametrize("keys", [("model", "net"), ("generator", "discriminator"), ("student", "teacher")])
def test_a_checkpoint_of_two_models_is_refused_and_its_advice_works(tmp_path: Path, keys: tuple[str, str]) -> None:
    content = dict.fromkeys(keys, STATE)
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UploadError, match=rf"holds models under '{keys[0]}', '{keys[1]}': must be one model; save"):
        read_checkpoint(tmp_path / "a.pt")
    torch.save(content[keys[0]], tmp_path / "b.pt")
    assert equal(read_checkpoint(tmp_path / "b.pt"), STATE)


def test_a_file_is_read_by_its_content(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{key: value.numpy() for key, value in STATE.items()})
    save_file(STATE, tmp_path / "a.bin")
    for name in ("a.npz", "a.bin"):
        assert equal(read_checkpoint(tmp_path / name), STATE)


def test_a_whole_module_is_refused_and_its_class_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")

    with pytest.raises(
        UploadError, match=r"a pickle that asks for 'torch.nn.modules.linear.Linear', which is not a tens"
    ):
        read_checkpoint(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_archive_is_refused_as_code(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "a.pt")  # type: ignore[no-untyped-call]

    with pytest.raises(UploadError, match="a TorchScript archive, which is code: must be a .safetensors file"):
        read_checkpoint(tmp_path / "a.pt")


def test_an_archive_that_unpacks_to_far_more_than_it_is_is_refused_unread(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(4.0)}, stream)
    with zipfile.ZipFile(stream) as good, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            bad.writestr(name, bytes(2**26) if name.endswith("data/0") else good.read(name))

    with pytest.raises(UploadError, match=r"it is an archive that unpacks to \d+ bytes, far more than its own size"):
        read_checkpoint(tmp_path / "a.pt")


def test_a_dict_that_holds_itself_is_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    torch.save(content, tmp_path / "a.pt")

    with pytest.raises(UploadError, match="a.pt holds dict in which 'model' is dict: must be a state_dict"):
        read_checkpoint(tmp_path / "a.pt")


CLASSES = ("cat", "dog", "owl")
BY_NUMBER = dict(enumerate(CLASSES))


@pytest.mark.parametrize(
    ("beside", "found"),
    [
        ({"classes": list(CLASSES)}, CLASSES),
        ({"class_to_idx": {"owl": 2, "cat": 0, "dog": 1}}, CLASSES),
        ({"idx_to_class": {"2": "owl", "0": "cat", "1": "dog"}}, CLASSES),
        ({"hyper_parameters": {"class_names": CLASSES}}, CLASSES),
        ({"meta": {"CLASSES": CLASSES}}, CLASSES),
        ({"classes": 3, "label2id": {"cat": 0, "dog": 1, "owl": 2}}, CLASSES),
        ({"id2label": {0: "LABEL_0", 1: "LABEL_1"}}, ()),
        ({"class_to_idx": {"cat": 0, "dog": 2}}, ()),
        ({}, ()),
    ],
)
def test_names_of_classes_are_read_in_the_order_of_their_numbers(
    tmp_path: Path, beside: dict[str, Any], found: tuple[str, ...]
) -> None:
    torch.save({"state_dict": STATE, **beside}, tmp_path / "a.pt")
    assert read_classes(tmp_path / "a.pt") == read_classes({"state_dict": STATE, **beside}) == found
    assert equal(read_checkpoint(tmp_path / "a.pt"), STATE)


def test_names_of_classes_are_read_from_hugging_face_s_folders_from_metadata_and_from_modules(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors", {"class_to_idx": '{"cat": 0, "dog": 1, "owl": 2}', "format": "pt"})
    (folder := tmp_path / "hf").mkdir()
    save_file(STATE, folder / "model.safetensors")
    (folder / "config.json").write_text('{"id2label": {"0": "cat", "1": "dog", "2": "owl"}}')
    module = nn.Linear(2, 3)
    module.config = SimpleNamespace(id2label=BY_NUMBER)  # type: ignore[assignment]
    for model in (tmp_path / "a.safetensors", folder, folder / "model.safetensors", module):
        assert read_classes(model) == CLASSES
    (folder / "config.json").write_text("{")
    with pytest.raises(UploadError, match=r"config.json is damaged"):
        read_classes(folder)


@pytest.mark.parametrize("separator", ["C:\\models\\", "models/", ""])
def test_an_index_names_its_files_as_any_system_writes_paths(tmp_path: Path, separator: str) -> None:
    for number, (key, value) in enumerate(STATE.items()):
        save_file({key: value}, tmp_path / f"model-{number}.safetensors")
    places = {key: f"{separator}model-{number}.safetensors" for number, key in enumerate(STATE)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert equal(read_checkpoint(tmp_path), STATE)
    (tmp_path / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UploadError, match="its index names model-1.safetensors: it is a pointer of Git LFS"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS, 'git lfs pull' fetches"),
        (b"\n<!DOCTYPE html><html>404", "it is a web page, perhaps of a download that failed"),
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "it is an HDF5 file, as Keras writes them"),
        (b"", "it is empty"),
        (b"hello\n", ""),
        (b"\x80\x04", ""),
        (pickle.dumps([print]), ""),
    ],
)
def test_another_file_is_refused_without_advice_to_trust_it_and_named_if_often_taken_for_weights(
    tmp_path: Path, name: str, content: bytes, line: str, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UploadError, match=f"{name} cannot be read as weights: {line}.*: must be a .safeten") as error:
        read_checkpoint(tmp_path / name)

    assert "weights_only" not in str(error.value)
    assert not recwarn.list


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("inside", [True, False])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, inside: bool) -> None:
    path, target = tmp_path / "model.pt", tmp_path / "made-by-the-pickle"
    evil = Malicious(target)
    torch.save({**STATE, "evil": evil} if inside else evil, path)

    with pytest.raises(UploadError, match=r"model.pt cannot be read as weights: it is a pickle that asks for '"):
        read_checkpoint(path)

    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # the file is what it claims to be


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UploadError, match=r"absent.pt does not exist: must be a .safetensors file"):
        read_checkpoint(tmp_path / "absent.pt")
    with pytest.raises(UploadError, match="is a folder without a model"):
        read_checkpoint(tmp_path)
