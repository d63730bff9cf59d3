"""Lines that only grow survive a writer that stops inside one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strategies.core.errors import StoreError
from strategies.run.lines import JsonLines


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


def test_a_damaged_line_in_the_middle_is_an_error_only_if_strict(lines: JsonLines) -> None:
    lines.path.write_bytes(b'{"n": 1}\n\0\0\0\n{"n": 3}\n')
    with pytest.raises(StoreError, match="line 2 is damaged"):
        lines.rows()
    assert JsonLines(lines.path, strict=False).rows() == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("tail", [b"\0\0\0", b"\0\0\n", b"[1]\n", b'{"n": 2', b"\xff\n"])
def test_repair_cuts_off_a_damaged_tail(lines: JsonLines, tail: bytes) -> None:
    lines.path.write_bytes(b'{"n": 1}\n' + tail)
    lines.repair()
    assert lines.path.read_bytes() == b'{"n": 1}\n'
