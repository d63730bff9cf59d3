"""On a terminal a bar shows how far a stage is, and lines of the log stay whole above it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.text import Text

from server_app.launch import console
from server_app.launch.console import Bar, progress_bar
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


def test_journal_writes_to_the_bar_of_the_terminal_and_logs_its_last_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_without_a_terminal_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ProgressFile.VARIABLE, raising=False)
    with progress_bar("text"):
        assert ProgressFile.named() is None
        console.say("a note of \x1b[2J\nand another", "text")

    assert capsys.readouterr().out == r"a note of \x1b[2J" + "\nand another\n"
