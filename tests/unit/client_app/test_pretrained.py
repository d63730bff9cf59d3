from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from client_app.work import load_checkpoint
from strategies.core.errors import UploadError

STATE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.steps": torch.tensor(7)}


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def assert_state(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], value) for key, value in STATE.items())


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")

    assert_state(load_checkpoint(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_torch_file_is_read_also_if_it_wraps_its_state_dict(tmp_path: Path, suffix: str, wrapped: bool) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"state_dict": STATE, "epoch": 3} if wrapped else STATE, path)

    assert_state(load_checkpoint(path))


@pytest.mark.parametrize("inside", [True, False])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, inside: bool) -> None:
    path, target = tmp_path / "model.pt", tmp_path / "made-by-the-pickle"
    evil = Malicious(target)
    torch.save({**STATE, "evil": evil} if inside else evil, path)

    with pytest.raises(UploadError, match=r"model.pt cannot be read as weights: it is a pickle that asks for '"):
        load_checkpoint(path)

    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # the file is what it claims to be


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UploadError, match=r"absent.pt does not exist: must be a .safetensors file"):
        load_checkpoint(tmp_path / "absent.pt")
    with pytest.raises(UploadError, match="is a folder without a model"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [torch.ones(2).bfloat16(), torch.eye(3).to_sparse()], ids=["bfloat16", "sparse"])
def test_a_tensor_that_no_upload_can_carry_is_refused_by_name(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"fine": torch.ones(2), "fc.weight": value}, tmp_path / "model.pt")

    with pytest.raises(UploadError, match=r"model.pt, tensor 'fc.weight' is torch"):
        load_checkpoint(tmp_path / "model.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_damaged_file_is_refused_in_one_line_whatever_is_wrong_with_it(
    tmp_path: Path, name: str, legacy: bool
) -> None:
    path, rng = tmp_path / name, np.random.default_rng(0)
    if name.endswith(".pt"):
        torch.save({"state_dict": STATE}, path, _use_new_zipfile_serialization=not legacy)
    else:
        save_file(STATE, path)
    whole, refused = path.read_bytes(), 0

    for cut in (0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(UploadError, match="cannot be read as weights") as error:
            load_checkpoint(path)
        assert len(str(error.value)) < 400 + len(str(path))
    for _ in range(150):
        torn = bytearray(whole)
        for position in rng.integers(0, min(len(whole), 700), 3):
            torn[position] = rng.integers(0, 256)
        path.write_bytes(torn)
        try:
            load_checkpoint(path)  # anything but an UploadError fails the test
        except UploadError as error:
            refused += "\n" not in str(error)

    assert refused > 10
