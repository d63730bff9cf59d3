"""The line that a user gets, and what it shows of a text from outside."""

from __future__ import annotations

import pytest

from strategies.core.errors import OneShotError, StoreError, UploadError, printable


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(StoreError("file:\n damaged\t(bytes)")) == "file: damaged (bytes)"


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
