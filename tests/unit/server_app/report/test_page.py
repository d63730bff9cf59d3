"""A run's page: it holds the whole run, in one file, with every foreign text escaped."""

from __future__ import annotations

import base64
import html
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from server_app.report.finish import finish
from server_app.report.page import Page, Table, write_page
from strategies.run.run_folder import RunFolder
from strategies.run.stage import keep_outcome

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PLAIN = Page("title", "", [], [], [], [], "", [])


class Outline(HTMLParser):
    """Collects every tag with its attributes, and refuses a page whose tags do not close."""

    EMPTY = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def page(run_folder: Callable[..., Path], stage: Callable[..., Any]) -> tuple[Path, dict[str, Any]]:
    report, settings, images = stage("fedens")
    path = run_folder()
    with RunFolder.open(path) as folder:
        keep_outcome(folder, report, 1)
        return path, finish(folder, settings, report, images, seconds={"server": 2.0}, log=str)


def test_page_of_a_run_holds_its_facts_table_classes_refusals_and_commands(page: tuple[Path, dict[str, Any]]) -> None:
    path, result = page
    text = html.unescape((path / "report.html").read_text())

    assert "fedens on digits, 3 clients" in text
    assert f"{result['accuracy']:.2f} % on held-out images" in text
    for row in result["table"]:
        cells = f'<td>{row["name"]}</td><td>{row["kind"]}</td><td class="number">{row["accuracy"]:.2f}</td>'
        assert cells in text
    assert "Training examples per class" in text
    assert "refused: node-7, " in text
    assert result["weights_sha256"] in text
    assert "load_ensemble_module" in text
    assert f"oneshot compare {path} --methods fedens,label-count-ensemble,tally" in text


def test_page_of_a_run_needs_no_other_file_and_no_network(page: tuple[Path, dict[str, Any]]) -> None:
    path, result = page
    text = (path / "report.html").read_text()
    outline = Outline(text)

    images = [attributes["src"] or "" for tag, attributes in outline.tags if tag == "img"]
    assert len(images) == len(result["plots"]) > 0
    assert all(source.startswith("data:image/png;base64,") for source in images)
    assert {tag for tag, _ in outline.tags}.isdisjoint({"script", "link", "iframe", "a"})
    assert not re.search(r"url\(|@import|https?:", text)


def test_texts_of_clients_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    png = base64.b64encode(b"png").decode()
    table = Table(evil, [evil], [[evil]])

    write_page(tmp_path / "page.html", Page(evil, evil, [(evil, evil)], [evil], [table], [(evil, png)], evil, [evil]))

    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 12
    Outline(text)


def test_parts_without_content_are_left_out(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", PLAIN)

    assert "<h2>" not in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.plots
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1400])
def test_page_in_a_browser_does_not_overflow(page: tuple[Path, dict[str, Any]], width: int, tmp_path: Path) -> None:
    probe = "<script>document.title = [document.documentElement.scrollWidth, innerWidth, " \
        "[...document.images].every(i => i.naturalWidth > 0)].join(' ')</script>"  # fmt: skip
    shown = tmp_path / "shown.html"
    shown.write_text((page[0] / "report.html").read_text().replace("</body>", f"{probe}</body>"))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]

    done = subprocess.run([*command, shown.as_uri()], capture_output=True, text=True, timeout=60, check=True)

    measured = re.search(r"<title>(\d+) (\d+) (\w+)</title>", done.stdout)
    assert measured is not None
    assert int(measured[1]) <= int(measured[2])
    assert measured[3] == "true"
