"""The line that a user gets."""

from __future__ import annotations

from strategies.core.errors import LONGEST, StoreError


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(StoreError("file:\n damaged\t(bytes)")) == "file: damaged (bytes)"


def test_an_error_that_quotes_too_much_keeps_its_beginning_and_its_end() -> None:
    line = str(StoreError(f"file is damaged: {'a' * 9000}: must be a file"))

    assert len(line) <= LONGEST
    assert line.startswith("file is damaged: aaa")
    assert line.endswith("aaa: must be a file")
