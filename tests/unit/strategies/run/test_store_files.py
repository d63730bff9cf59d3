"""Files are whole or absent, weights and facts come back as they were."""

from __future__ import annotations

import copy
import json
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from store_faults import Faults, disk_full, names

from strategies.core.durable import atomic_write, read_json, sha256_file, with_digest
from strategies.core.errors import StoreError
from strategies.core.fingerprint import weights_sha256
from strategies.core.toml import read_toml
from strategies.run.checkpoint import unflatten
from strategies.run.files import JsonLines, read_weights, save_weights, weights_bytes, write_json
from strategies.run.scratch import to_scratch
from strategies.run.traffic import Traffic
from strategies.run.uploads import UploadStore

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_atomic_write_over_a_file_replaces_it_and_leaves_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", b"old")
    atomic_write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_atomic_write_when_any_call_fails_keeps_a_whole_file_and_no_temporary(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "a"
    calls = faults.count(lambda: atomic_write(path, b"old"))
    assert calls == 3  # the file, the rename, the folder
    for index in range(calls):
        with faults.at(index, disk_full), pytest.raises(OSError, match="No space"):
            atomic_write(path, b"new")
        # Only the folder's sync comes after the rename.
        assert path.read_bytes() == (b"new" if index == 2 else b"old")
        assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4)])
def test_weights_of_every_dtype_and_shape_round_trip(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    tensor = tensor if shape == (2, 3, 4) else tensor.reshape(-1)[: 1 if 0 not in shape else 0].reshape(shape)
    digest = save_weights(tmp_path / "w", {"a": tensor})
    assert same(read_weights(tmp_path / "w")["a"], tensor)
    assert digest == sha256_file(tmp_path / "w")


def test_weights_have_the_bytes_that_safetensors_writes() -> None:
    names = ("w", 'a"b', "\\", "\x01\n", "ü€😀", "z/</")
    state = {f"{names[k % 6]}{k}": torch.arange(12).reshape(3, 4).T.to(dtype) for k, dtype in enumerate(DTYPES)}
    state |= {"one": torch.tensor(3.0), "none": torch.empty((0, 3), dtype=torch.float16)}
    assert weights_bytes(state) == safetensors.torch.save({name: value.contiguous() for name, value in state.items()})
    assert weights_bytes({}) == safetensors.torch.save({})


def test_weights_keep_the_bits_of_nan_and_negative_zero(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC12345, -0x80000000], dtype=torch.int32)
    save_weights(tmp_path / "w", {"a": bits.view(torch.float32)})
    assert torch.equal(read_weights(tmp_path / "w")["a"].view(torch.int32), bits)


def test_weights_bytes_do_not_depend_on_order_and_hold_no_metadata() -> None:
    state = {name: torch.full((2,), float(i)) for i, name in enumerate("qwertyuiopasdf")}
    data = weights_bytes(state)
    assert data == weights_bytes(dict(reversed(state.items())))
    (length,) = struct.unpack("<Q", data[:8])
    assert set(json.loads(data[8 : 8 + length])) == set(state)


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": -torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(0)},
        {},
    ],
)
def test_weights_sha256_differs_by_name_shape_dtype_and_bits(other: dict[str, torch.Tensor]) -> None:
    assert weights_sha256(other) != weights_sha256({"a": torch.zeros(2, 3)})


def test_json_round_trips_and_turns_foreign_numbers_into_plain_ones(tmp_path: Path) -> None:
    pairs: dict[Any, tuple[Any, Any]] = {
        "f": (np.float32(0.5), 0.5),
        "i": (np.int64(3), 3),
        "t": (torch.tensor(2.0), 2.0),
        "l": ((1, torch.tensor([1, 2])), [1, [1, 2]]),
        "nan": (float("nan"), None),
        "inf": ([np.float64("inf")], [None]),
        "path": (Path("/x"), "/x"),
        1: (None, None),
        "b": (True, True),
    }
    write_json(tmp_path / "j", {key: value for key, (value, _) in pairs.items()})
    assert read_json(tmp_path / "j") == {str(key): plain for key, (_, plain) in pairs.items()}


# Lines that only grow survive a writer that stops inside one.


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes beyond ``size`` bytes fail, part by part, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    return JsonLines(tmp_path / "x.jsonl")


@pytest.mark.parametrize("sync", [True, False])
def test_append_keeps_order_and_values(lines: JsonLines, sync: bool) -> None:
    rows = [{"a": 1, "b": [1.5, None]}, {"text": "ä\nb"}, {}]
    for row in rows:
        lines.append(row, sync=sync)
    assert lines.rows() == rows
    assert lines.path.read_bytes().count(b"\n") == 3


def test_any_cut_of_the_last_line_is_ignored_and_overwritten(lines: JsonLines) -> None:
    lines.append({"n": 1})
    whole = lines.path.stat().st_size
    lines.append({"n": 2})
    data = lines.path.read_bytes()
    for length in range(whole, len(data)):
        lines.path.write_bytes(data[:length])
        assert lines.rows() == [{"n": 1}]
        lines.append({"n": 3})
        assert lines.rows() == [{"n": 1}, {"n": 3}]


def test_append_when_the_disk_fills_inside_a_line_leaves_the_file_as_it_was(lines: JsonLines) -> None:
    lines.append({"n": 1})
    before = lines.path.read_bytes()
    with largest_file(len(before) + 5), pytest.raises(OSError, match="File too large"):
        lines.append({"n": 2, "text": "long enough"})
    assert lines.path.read_bytes() == before
    lines.append({"n": 3})
    assert lines.rows() == [{"n": 1}, {"n": 3}]


def line_of(number: int) -> bytes:
    return json.dumps(with_digest({"n": number})).encode() + b"\n"


def test_a_damaged_line_in_the_middle_is_an_error_only_if_strict(lines: JsonLines) -> None:
    lines.path.write_bytes(line_of(1) + b"\0\0\0\n" + line_of(3))
    with pytest.raises(StoreError, match="line 2 is damaged"):
        lines.rows()
    assert JsonLines(lines.path, strict=False).rows() == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("tail", [b"\0\0\0", b"\0\0\n", b"[1]\n", b'{"n": 2', b"\xff\n"])
def test_repair_cuts_off_a_damaged_tail(lines: JsonLines, tail: bytes) -> None:
    lines.path.write_bytes(line_of(1) + tail)
    lines.repair()
    assert lines.path.read_bytes() == line_of(1)


# What the fuzzing suite found broken once, each by its smallest input.


DEEP = b"[" * 200_000


def test_json_that_is_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(DEEP)
    (tmp_path / "uploads.jsonl").write_bytes(DEEP + b"\n" + b'{"a": 1}\n')

    with pytest.raises(StoreError, match="no JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(StoreError, match="line 1 is damaged"):
        JsonLines(tmp_path / "uploads.jsonl").rows()
    with pytest.raises(StoreError, match="damaged"):
        UploadStore(tmp_path).records()


def test_numbers_that_no_file_of_ours_holds_are_damage(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text('{"phases": {"upload": {"up": {"a": 1e999}, "down": {}}}}')

    with pytest.raises(StoreError, match="traffic.json: damaged"):
        Traffic.read(tmp_path / "traffic.json")
    with pytest.raises(ValueError, match="a float of 1 bytes"):
        unflatten({"float": "00"}, {})


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, "a" + ".a" * 20_000 + " = 1", "a = 0x" + "f" * 10_000])
def test_toml_that_would_take_all_memory_or_cannot_be_printed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|of more than"):
        read_toml(text)


def test_tensors_that_wait_on_the_disk_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), "whole": torch.arange(6).view(2, 3).T,
        "half": torch.randn(4).bfloat16(), "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(), "expanded": torch.ones(1).expand(5),
    }  # fmt: skip
    waiting = to_scratch(tmp_path, tensors.items())

    for found in (waiting, copy.deepcopy(waiting)):
        assert list(found) == list(tensors)
        for name, value in tensors.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
    assert list(tmp_path.iterdir()) == []  # its file has no name
