"""The documentation as a site: every page is there, links stay in it, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import CHROMIUM, opened
from site_hooks import OUTSIDE, ROOT, rooms, site_links


@pytest.mark.parametrize(
    ("source", "page", "text", "wanted"),
    [
        ("README.md", "index.md", "[a](docs/running.md#rounds)", "[a](running.md#rounds)"),
        ("README.md", "index.md", "[a](docs/methods/README.md)", "[a](methods/README.md)"),
        ("docs/methods/fens.md", "methods/fens.md", "[a](../running.md)", "[a](../running.md)"),
        ("docs/methods/fens.md", "methods/fens.md", "[a](../../SECURITY.md)", "[a](../security.md)"),
        ("docs/running.md", "running.md", "[a](../conf/short.toml) [b](https://x.y)", "a [b](https://x.y)"),
        ("docs/running.md", "running.md", "[a](#here) ![p](plot.svg)", "[a](#here) ![p](plot.svg)"),
        ("docs/running.md", "running.md", "```\n[a](../conf/short.toml)\n```", "```\n[a](../conf/short.toml)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_become_texts(source: str, page: str, text: str, wanted: str) -> None:
    assert site_links(text, ROOT / source, page) == wanted


def test_every_page_has_its_place_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    folders = (ROOT / "docs", ROOT / "docs" / "results")
    pages = [path.relative_to(ROOT / "docs").as_posix() for folder in folders for path in folder.glob("*.md")]

    assert [page for page in [*pages, *OUTSIDE.values()] if f": {page}\n" not in navigation] == []


def test_reference_has_every_module_of_library_and_app_once() -> None:
    named = [module for modules in rooms().values() for module in modules]
    folders = ("strategies", "fl_app", "client_app")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.name.startswith("_")]

    # A folder without __init__.py is no package, as that of the start-up code of offline processes.
    wanted = [path for path in paths if (path.parent / "__init__.py").exists()]
    assert sorted(named) == sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in wanted)


def test_packages_of_the_site_are_locked_in_the_versions_of_the_program() -> None:
    site, program = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("requirements-docs.lock", "requirements.lock")
    )
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["docs"]

    assert {re.split(r"[\[<>=]", name)[0] for name in asked} <= site.keys()
    assert {name: version for name, version in site.items() if program.get(name, version) != version} == {}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the packages of the group docs are not installed")
def test_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "methods/tally.html", "deploy.html", "reference/strategies.run.html"} <= pages.keys()
    loaded = re.compile(r"<(?:script|img|iframe|link rel=.stylesheet.)[^>]*(?:src|href)=.https?:[^>]*>")
    assert {name: found for name, text in pages.items() if (found := loaded.findall(text))} == {}
    if CHROMIUM:
        page = (tmp_path / "site" / "methods" / "tally.html").as_uri()
        shown, errors = opened(f"{page}?q=quorum", tmp_path)
        assert errors == []
        assert re.search(r"[1-9]\d* matching documents", shown)  # of the search, in a page opened as a file
