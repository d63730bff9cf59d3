"""The tables in the pages are those that follow from the stored results."""

from __future__ import annotations

import runpy

import pytest
from doc_pages import ROOT

from strategies.run.files import read_json

TABLES = runpy.run_path(str(ROOT / "tests" / "bench" / "feature_tables.py"))["tables"]()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_page_has_the_table_of_the_results(name: str) -> None:
    text, page = TABLES[name]
    assert text in (ROOT / "docs" / page).read_text()


def test_the_page_has_the_gatekeepers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ROOT / "tests" / "bench"
    monkeypatch.syspath_prepend(str(bench))
    results = read_json(ROOT / "docs" / "results" / "gatekeeper-fresh.json")
    table = runpy.run_path(str(bench / "gatekeeper.py"))["table"](results["rows"])
    assert table in (ROOT / "docs" / "uploads.md").read_text()


def test_the_page_has_the_rivals_figures_and_their_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ROOT / "tests" / "bench"
    monkeypatch.syspath_prepend(str(bench))
    rivals = runpy.run_path(str(bench / "rivals.py"))
    rows = read_json(ROOT / "docs" / "results" / "rivals.json")["rows"]
    page = (ROOT / "docs" / "tally.md").read_text()
    assert len(rows) == 3 * len(rivals["DATA"]) * (1 + len(rivals["REPLAYS"]))
    assert [line for line in rivals["table"](rows).splitlines() if line not in page] == []
    assert rivals["differences"](rows) in page
