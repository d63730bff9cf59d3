"""What an error shows of a text from outside."""

from __future__ import annotations

import pytest

from strategies.core.errors import OneShotError, UploadError, printable


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
