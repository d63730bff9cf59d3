"""The line that a user gets, and what it shows of a text from outside."""

from __future__ import annotations

import pytest

from strategies.core.errors import LONGEST, OneShotError, StoreError, UploadError, printable
from strategies.flower.nodes import Refusals


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(StoreError("file:\n damaged\t(bytes)")) == "file: damaged (bytes)"


def test_an_error_that_quotes_too_much_keeps_its_beginning_and_its_end() -> None:
    line = str(StoreError(f"file is damaged: {'a' * 9000}: must be a file"))

    assert len(line) <= LONGEST
    assert line.startswith("file is damaged: aaa")
    assert line.endswith("aaa: must be a file")


@pytest.mark.parametrize("text", ["\x01" * 2**20, "a b\n" * 2**18, "a" * 9000])
def test_no_answer_makes_a_reason_longer_than_a_line(text: str) -> None:
    assert len(UploadError(text, "alice").reason) <= LONGEST
    refusals = Refusals(None)
    refusals.add("alice", text)
    assert [len(reason) <= LONGEST for _, reason in refusals.heard] == [True]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[31mall is well\x1b[0m", r"\x1b[2J\x1b[31mall is well\x1b[0m"),
        ("\x9b31m", r"\x9b31m"),
        ("fine\rrefused", "fine refused"),
        ("a\nb\x00c\x07", r"a b\x00c\x07"),
        ("\u202egnirts", r"\u202egnirts"),
        ("\ud800", r"\ud800"),
        ("Größe 3 µm, 模型", "Größe 3 µm, 模型"),
    ],
)
def test_control_characters_of_a_client_are_written_out(text: str, shown: str) -> None:
    assert str(OneShotError(text)) == shown
    assert str(UploadError(text, "alice")) == f"alice: {shown}"
    assert UploadError(text, "alice").reason == shown  # which logs and the table of refusals show
    assert printable(shown) == shown
