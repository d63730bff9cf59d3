"""README's part of the table of docs/tally.md, and its plot, against that table."""

from __future__ import annotations

import re
import runpy
from html import unescape

from doc_pages import ROOT, section

README, PAGE = ROOT / "README.md", ROOT / "docs" / "tally.md"
WHY = "## Why Tally"
SCRIPT = runpy.run_path(str(ROOT / "tests" / "bench" / "tally_plot.py"))


def test_readme_s_rows_are_those_of_the_page() -> None:
    table_of = SCRIPT["table_of"]
    (sets, page), (shown, readme) = table_of(PAGE.read_text()), table_of(README.read_text(), WHY)

    assert shown == sets
    assert {name: page.get(name) for name in readme} == readme
    assert [name for name, cells in readme.items() if any(cells)] == list(SCRIPT["SHOWN"])


def test_the_plot_shows_the_figures_of_the_page() -> None:
    sets, table = SCRIPT["table_of"](PAGE.read_text())
    svg = (ROOT / "docs" / "tally.svg").read_text()

    told = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]

    wanted = [SCRIPT["cell_of"](table[name][k]).text for k in range(len(sets)) for name in SCRIPT["SHOWN"]]
    assert [text for text in told if re.fullmatch(r"\d+\.\d\*?", text)] == wanted
    assert {*sets} <= {*told}
    assert "docs/tally.svg" in section(README, WHY)
