"""A run's page: it holds the whole run, in one file, with every foreign text escaped."""

from __future__ import annotations

import html
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest
from browser import check_looks, needs_browser
from click import Group
from commands import MakeRun, Stage, finished_in
from typer.main import get_command

from server_app.cli import cli
from server_app.replay.request import ReplayRequest
from server_app.replay.stored import unmet_need
from server_app.report.page import Page, Plot, write_page
from server_app.report.tables import Table
from server_app.settings.catalogue import catalogue
from server_app.settings.read import default_settings
from strategies.run.run_folder import RunFolder


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
def page(run_folder: MakeRun, stage: Stage, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    method = getattr(request, "param", "fedens")
    path = run_folder(client__epochs=8, method=method)
    return path, finished_in(path, *stage(method, client__epochs=8), log=str)


def test_page_of_a_run_holds_its_facts_table_classes_bytes_and_refusals(page: tuple[Path, dict[str, Any]]) -> None:
    path, result = page
    text = html.unescape((path / "report.html").read_text())

    assert "<h1>FedENS on digits</h1>" in text
    assert "digits · split dirichlet-classes, alpha 0.3 · 3 clients · seed 0" in text
    assert f"<b>{result['accuracy']:.2f} %</b> <span>accuracy on held-out examples, 95 % within " in text
    assert "calibration error" in text
    for row in result["table"]:
        cells = f'<td>{row["name"]}</td><td>{row["kind"]}</td><td class="number">'
        assert cells in text
        assert f'<td class="number">{row["accuracy"]:.2f}</td>' in text
    assert "Who held which classes" in text
    assert '<tr><td>upload</td><td class="number">1001 B</td><td class="number">150 B</td>' in text
    assert "refused: node-7: " in text
    assert result["weights_sha256"] in text
    assert "load_ensemble_module" in text
    for fact in ("oneshot-fl", "torch", "0123456789ab", "client.epochs=8"):
        assert fact in text


@pytest.mark.parametrize(
    ("page", "methods", "runs"),
    [
        ("fedens", ["fedens", "tally", "dense"], ["none"]),
        ("fedavg", ["fedavg", "ties", "tsv", "fedens", "tally", "dense"], ["none", "ridge"]),
    ],
    indirect=["page"],
)
def test_commands_of_a_page_are_accepted_and_fit_the_uploads(
    page: tuple[Path, dict[str, Any]], methods: list[str], runs: list[str]
) -> None:
    path, _ = page
    text = html.unescape((path / "report.html").read_text())
    commands = re.findall(r'<pre class="command">(.*?)</pre>', text)

    assert f"oneshot compare {path} --methods {','.join(methods)}" in commands
    assert [command.split()[-1] for command in commands if " replay " in command] == methods[1:4]
    finishes = []
    for command in commands:
        _, name, *words = shlex.split(command)
        given = cast("Group", get_command(cli)).commands[name].make_context(name, words).params
        if name == "run":
            assert (given["method"], given["num_supernodes"]) == (methods[0], 3)
            with RunFolder.open(path, write=False) as folder:
                own = {**default_settings(), "method": methods[0], **catalogue().settings(given["settings"])}
                finishes.append(own["finish"])
                assert given["seed"] == (1 if own["finish"] == "none" else 0)
                assert {**own, "finish": "none"} == folder.info["settings"]
        for method in (given.get("methods") or given.get("method") or "fedens").split(","):
            assert unmet_need(ReplayRequest(path, method, {})) == ""
    assert finishes == runs


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
    table = Table(evil, [evil], [[evil]], notes=[evil])
    page = Page(evil, evil, evil, [(evil, evil)], [(evil, evil)], [evil], [table], [Plot(evil, "png", evil)], evil,
                [(evil, evil)])  # fmt: skip

    write_page(tmp_path / "page.html", page)

    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 18
    Outline(text)


@pytest.mark.slow
@pytest.mark.plots
@needs_browser
def test_page_in_a_browser_shows_all_images_without_error(page: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    check_looks(page[0] / "report.html", tmp_path / "browser", images=len(page[1]["plots"]))
