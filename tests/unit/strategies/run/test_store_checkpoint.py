"""A checkpoint comes back to the bit; test_power_cuts.py and test_full_disk.py have the crashes."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_fakes import described
from store_faults import names

from strategies.core.errors import StoreError
from strategies.method import Snapshot
from strategies.run.checkpoint import CheckpointFolder, flatten


def rich_state() -> dict[Any, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    nan_with_payload = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    return {
        "optimizer": optimizer.state_dict(),
        "rng": torch.Generator().manual_seed(3).get_state(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "legacy": np.random.RandomState(0).get_state(legacy=False),
        "floats": [0.1, -0.0, 1e-320, math.inf, -math.inf, nan_with_payload, 2.0],
        "plain": (1, True, False, None, "ü\ud800", 2**200, (), [], {}),
        3: {-1: "int key", True: 1, None: 2, 2.5: 3, (1, "a"): 4},
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "dict": [{"dict": 1}, {"tensor": "0"}],
    }


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).reshape(-1, 1)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoint")


def loaded(folder: CheckpointFolder) -> Snapshot:
    snapshot = folder.load()
    assert snapshot is not None
    return snapshot


def test_tree_with_an_odd_key_says_where_it_is() -> None:
    with pytest.raises(StoreError, match=r"state\['a'\].* key of type frozenset"):
        flatten({"a": {frozenset(): 1}})


def test_checkpoint_of_everything_round_trips(folder: CheckpointFolder) -> None:
    state = rich_state()
    folder.save(Snapshot(step=7, state=state, appended={"pool": torch.arange(6, dtype=torch.uint8).reshape(2, 3)}))
    snapshot = loaded(CheckpointFolder(folder.path))
    assert snapshot.step == 7
    assert described(snapshot.state) == described(state)
    assert described(snapshot.appended["pool"]) == described(torch.arange(6, dtype=torch.uint8).reshape(2, 3))


def test_rows_saved_after_a_load_continue_the_buffer(folder: CheckpointFolder) -> None:
    folder.save(Snapshot(1, {}, {"images": rows(1)}))
    again = CheckpointFolder(folder.path)
    assert torch.equal(loaded(again).appended["images"], rows(1))
    again.save(Snapshot(2, {}, {"images": rows(2)}))
    assert torch.equal(loaded(again).appended["images"], rows(1, 2))


def test_save_removes_the_state_before_and_strays(folder: CheckpointFolder) -> None:
    folder.save(Snapshot(1, {"a": torch.zeros(1)}))
    (folder.path / "state-stray.safetensors").touch()
    folder.save(Snapshot(2, {"a": torch.ones(1)}))
    assert len(names(folder.path)) == 2


def test_load_when_a_file_of_it_is_cut_or_missing_names_the_remedy(folder: CheckpointFolder) -> None:
    folder.save(Snapshot(1, {"w": torch.ones(4)}, {"images": rows(1)}))
    for path in list(folder.path.iterdir()):
        data = path.read_bytes()
        for length in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(StoreError, match=r"remove this folder to start the stage anew") as caught:
                folder.load()
            assert path.name in str(caught.value)
        path.write_bytes(data)
    assert loaded(folder).step == 1
    next(folder.path.glob("state-*")).unlink()
    with pytest.raises(StoreError, match="No such file"):
        folder.load()
