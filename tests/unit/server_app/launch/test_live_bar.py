"""Lines of Flower's log as a user sees them; on a terminal a bar shows how far a stage is below them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.text import Text

from server_app.launch import console
from server_app.launch.console import Bar, LogLines, progress_bar
from strategies.run.journal import Journal, ProgressFile


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv(ProgressFile.VARIABLE, raising=False)
    return stream


def test_bar_shows_what_a_stage_reports_and_goes_with_its_last_report(terminal: Terminal, tmp_path: Path) -> None:
    file = ProgressFile(tmp_path / "progress.json")
    bar = Bar(file, terminal)
    assert list(bar.get_renderables()) == []

    file.write(0.25, "tally: epoch 3 of 12\x1b[2J")
    bar.console.print(next(iter(bar.get_renderables())))
    assert r"tally: epoch 3 of 12\x1b[2J" in Text.from_ansi(terminal.getvalue()).plain
    assert bar.tasks[0].percentage == 25.0

    file.clear()
    assert list(bar.get_renderables()) == []


def test_journal_writes_to_the_bar_and_logs_its_last_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("sys.stdout", terminal)
    with progress_bar("text"):
        file = ProgressFile.named()
        with Journal(None, lines.append, label="tally") as journal:
            journal.report(3, 12, part=(1, 4))
            assert lines == []
            share, text = file.read() or (0.0, "")
            assert share == pytest.approx(3.25 / 12)
            assert text.startswith("tally: epoch 3 of 12, step 1 of 4")
            journal.report(12, 12)
            assert file.read() is None
        assert lines == ["tally: epoch 12 of 12, 0 s elapsed"]
        console.say("a note of \x1b[2J", "text")
    assert r"a note of \x1b[2J" in terminal.getvalue()
    assert ProgressFile.VARIABLE not in os.environ


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ProgressFile.VARIABLE, raising=False)
    with progress_bar("text"):
        assert ProgressFile.named() is None
        console.say("a note of \x1b[2J\nand another", "text")

    assert capsys.readouterr().out == r"a note of \x1b[2J" + "\nand another\n"


def shown(*lines: str, colour: bool = False) -> list[str]:
    reader = LogLines(colour=colour)
    return [out for line in lines for out in reader.take(line)] + list(reader.rest())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("\x1b[92mINFO \x1b[0m:      run folder: /r", ["run folder: /r"]),
        (
            "\x1b[36m(ClientAppActor pid=185)\x1b[0m \x1b[92mINFO \x1b[0m:      client-001: epoch 1",
            ["client-001: epoch 1"],
        ),
        ("\x1b[93mWARNING \x1b[0m:   refused client-002: NaN", ["WARNING refused client-002: NaN"]),
        ('  File "x.py", line 3', ['  File "x.py", line 3']),
        ("\x1b[92mINFO \x1b[0m:      ", []),
        ("\x1b[92mINFO \x1b[0m:      To change federation size, use the following command:", []),
        ("\x1b[91mERROR \x1b[0m:     Exit Code: 700", []),
        ("Using SuperLink: oneshot (127.0.0.1:37881)", []),
        ("Successfully installed oneshot-fl to /somewhere.", []),
    ],
)
def test_take_keeps_readable_characters(line: str, expected: list[str]) -> None:
    assert shown(line) == expected


def test_take_writes_out_control_characters() -> None:
    line = "\x1b[93mWARNING \x1b[0m:   eve: \x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    assert shown(line) == [r"WARNING eve: \x1b]0;title\x07\x1b[2J\x9b31m\u202e"]


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 1, in main', "    run()", "    ^^^^^"]


def test_take_of_a_traceback_of_ours_shows_nothing_of_it() -> None:
    error = "strategies.core.errors.QuorumError: 1 uploads arrived, min-uploads is 2."
    assert shown("before", *TRACE, error, "after") == ["before", "after"]
