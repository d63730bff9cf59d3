"""The plot of docs/lab/same-uploads.md, against the page's table."""

from __future__ import annotations

import re
import runpy
from html import unescape

from doc_pages import ROOT

SCRIPT = runpy.run_path(str(ROOT / "tests" / "bench" / "tally_plot.py"))


def test_the_plot_shows_the_figures_of_the_page() -> None:
    sets, table = SCRIPT["table_of"](SCRIPT["PAGE"].read_text())
    svg = SCRIPT["PLOT"].read_text()

    shown = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]

    wanted = [SCRIPT["cell_of"](table[name][k]).text for k in range(len(sets)) for name in SCRIPT["SHOWN"]]
    assert [text for text in shown if re.fullmatch(r"\d+\.\d\*?", text)] == wanted
    assert {*sets} <= {*shown}
