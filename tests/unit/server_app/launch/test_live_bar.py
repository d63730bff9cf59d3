"""On a terminal progress moves in one line, and other lines stay whole."""

from __future__ import annotations

import io

import pytest

from server_app.launch import console
from server_app.launch.console import CLEAR, LiveBar


def test_progress_replaces_progress_and_other_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    bar = LiveBar()

    written = "".join(
        map(bar.shown, ["a note", "tally: epoch 3 of 12, 5 s elapsed", "tally: epoch 6 of 12, step 3 of 6", "b", "c"])
    )

    assert written == (
        f"a note\n{CLEAR}█████░░░░░░░░░░░░░░░ tally: epoch 3 of 12, 5 s elapsed"
        f"{CLEAR}██████████░░░░░░░░░░ tally: epoch 6 of 12, step 3 of 6{CLEAR}b\nc\n"
    )


def test_last_progress_stays_as_a_line() -> None:
    bar = LiveBar()
    bar.shown("tally: epoch 3 of 12")

    assert bar.shown("tally: epoch 12 of 12, 9 s elapsed") == f"{CLEAR}tally: epoch 12 of 12, 9 s elapsed\n"
    assert bar.closed() == ""


def test_bar_fits_the_terminal_and_writes_out_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    written = LiveBar().shown("tally: epoch 3 of 12, \x1b[2J" + "x" * 100)

    assert len(written.removeprefix(CLEAR)) == 39
    assert "\x1b" not in written.removeprefix(CLEAR)


@pytest.mark.parametrize(("terminal", "written"), [(True, f"{CLEAR}░"), (False, "tally: epoch 0 of 12\n")])
def test_say_draws_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, terminal: bool, written: str) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", stream)

    console.say("tally: epoch 0 of 12", "text")
    assert stream.getvalue().startswith(written)
    console.end_bars()
    assert stream.getvalue().endswith(CLEAR) == terminal


def test_say_writes_out_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("a note of \x1b[2J\nand another", "text")

    assert capsys.readouterr().out == r"a note of \x1b[2J" + "\nand another\n"
