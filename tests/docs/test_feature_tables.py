"""The tables on features in the pages are those that follow from the stored results."""

from __future__ import annotations

import runpy

import pytest
from doc_pages import ROOT

TABLES = runpy.run_path(str(ROOT / "tests" / "bench" / "feature_tables.py"))["tables"]()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_page_has_the_table_of_the_results(name: str) -> None:
    text, page = TABLES[name]
    assert text in (ROOT / "docs" / page).read_text()
