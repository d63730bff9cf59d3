"""What the fuzzing suite found broken once, each by its smallest input."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategies.core.errors import StoreError, UploadError
from strategies.core.toml import read_toml
from strategies.run.files import read_json
from strategies.run.lines import JsonLines
from strategies.run.traffic import Traffic
from strategies.run.tree import unflatten
from strategies.run.uploads import UploadStore
from strategies.uploads.packed import from_wire

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

    with pytest.raises(StoreError, match="no account of messages"):
        Traffic.read(tmp_path / "traffic.json")
    with pytest.raises(ValueError, match="a float of 1 bytes"):
        unflatten({"float": "00"}, {})


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, "a" + ".a" * 20_000 + " = 1", "a = 0x" + "f" * 10_000])
def test_toml_that_would_take_all_memory_or_cannot_be_printed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|of more than"):
        read_toml(text)


def test_ranges_without_their_layers_are_refused() -> None:
    import numpy as np

    with pytest.raises(UploadError, match="must be two real numbers for each of 1 layers"):
        from_wire(0, {"0/<ranges>": np.zeros((2, 2))}, {"layers-0": ["a"]}, architecture="net", precision="int8")
