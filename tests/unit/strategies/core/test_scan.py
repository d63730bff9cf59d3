"""What a search of a folder takes and leaves out, by count and first names."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from strategies.core.scan import has_suffix, is_hidden, scan, without_suffix


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_every_file_is_taken_or_left_out(tmp_path: Path) -> None:
    files(tmp_path, "b.csv", "a.CSV", "c.xlsx", "d", ".hidden.csv", "~$c.csv", "@eaDir/a.csv", "sub/e.csv")
    flat = scan(tmp_path, lambda path: has_suffix(path, (".csv",)))
    assert [path.name for path in flat.taken] == ["a.CSV", "b.csv"]
    assert [path.name for path in flat.others] == ["c.xlsx", "d", "sub"]
    deep = scan(tmp_path, lambda path: has_suffix(path, (".csv",)), deep=True)
    assert [path.name for path in deep.taken] == ["a.CSV", "b.csv", "e.csv"]
    assert [str(path.relative_to(tmp_path)) for path in deep.hidden] == [".hidden.csv", "~$c.csv", "@eaDir/a.csv"]
    hidden = "3 files that are hidden or a tool's: .hidden.csv, ~$c.csv, @eaDir/a.csv"
    assert deep.left_out == f"2 files (1 .xlsx, 1 no suffix): c.xlsx, d; {hidden}"
    assert scan(files(tmp_path / "all", "a.csv"), lambda path: True).left_out == ""


@pytest.mark.parametrize("name", [".ipynb_checkpoints", "@eaDir", "__MACOSX", ".DS_Store", "Thumbs.db", "._a.png"])
def test_tools_leave_these(name: str) -> None:
    assert is_hidden(name)
    assert not is_hidden(name.strip("._@~") + "x")


def test_a_link_to_a_parent_ends(tmp_path: Path) -> None:
    (files(tmp_path, "sub/a.csv") / "sub" / "loop").symlink_to(tmp_path)
    assert len(scan(tmp_path, lambda path: True, deep=True).taken) == 1


def test_a_line_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[int, str]] = []
    monkeypatch.setattr("strategies.core.scan.LOG.log", lambda level, form, line: lines.append((level, form % line)))
    found = scan(files(tmp_path, "a.csv", "b.gif"), lambda path: has_suffix(path, (".csv",)))
    found.report("tables")
    found.report("tables")
    assert lines == [(logging.WARNING, f"{tmp_path}: 1 tables; left out are 1 file (1 .gif): b.gif")]


def test_suffixes_of_two_parts() -> None:
    assert without_suffix(Path("model.PTH.tar"), (".pth", ".pth.tar", ".tar")) == "model"
    assert without_suffix(Path("v1.2"), (".pt",)) == "v1.2"
