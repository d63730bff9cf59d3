"""A table in a window of any width, of any names."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from server_app.report import tables


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_number_and_no_name_is_cut_however_narrow_the_window_is(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    console = Console(file=said, width=width, markup=False, highlight=False)
    monkeypatch.setattr(tables, "output_console", lambda: console)
    name = "20261122-134426-tally-870bfc"

    columns = ["run", "data and split", "accuracy, %"]
    rows = [[name, "digits by dirichlet", "85.60"]]
    tables.Table("Runs", columns, rows, texts=2, notes=["One."]).print(whole=1)

    lines = said.getvalue().splitlines()
    assert any(name in line and "85.60" in line for line in lines)
    assert all(word in said.getvalue() for word in ("accuracy, %", "digits", "One."))
    assert max(map(len, lines)) <= max(width, 54)
