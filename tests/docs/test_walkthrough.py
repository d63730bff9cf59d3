"""README and docs/getting-started.md, typed from top to bottom: every command and every block of code runs.

Settings at the end of a command make its work small. Both pages share one folder and its runs, so what the second page
repeats is not run again. ``tests/package`` installs the package, as the first commands of both do.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import FENCE, PLAIN, ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "getting-started.md"]
SMALL = "client.epochs=1 data.limit=300 tally.epochs=1 tally.images=64 tally.probes=64 dense.epochs=1 threads=1"
# What a program is given beside the words of the page.
ADDED = {"run": ["--set", SMALL], "compare": ["--set", "dense.epochs=1 dense.generator-steps=1"]}
# The backbone of the extra is another package: the one of docs/examples stands for it.
BACKBONE = ["--set", "features.backbone=edges:make"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder; what a clone has in it is linked."""
    made = tmp_path_factory.mktemp("walk")
    for name in ("docs", "conf"):
        (made / name).symlink_to(ROOT / name)
    (made / "edges.py").symlink_to(ROOT / "docs" / "examples" / "backbone" / "edges.py")
    return made


@pytest.fixture(scope="module")
def done() -> set[str]:
    """The commands that have run."""
    return set()


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language of each block that is typed, and one of its commands, or all of its code."""
    for language, body in FENCE.findall(page.read_text()):
        if language == "python":
            yield language, body
        elif language == "console":
            yield from ((language, line) for line in body.replace("\\\n", " ").splitlines() if line.strip())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_works_from_top_to_bottom(page: Path, folder: Path, done: set[str]) -> None:
    typed = 0
    for language, text in steps(page):
        words = shlex.split(text, comments=True) if language == "console" else []
        if text in done or (words and words[0] in PLAIN):
            continue
        if language == "python" and "my_project" in text:
            continue  # the reader's own module; tests/docs/test_readme.py has one
        done.add(text)
        run(words or [sys.executable, "-c", text], folder)
        typed += 1
    assert typed > 3


def run(words: list[str], folder: Path) -> None:
    """Run a command in the reader's folder."""
    if words[0] == "oneshot":
        added = ADDED.get(words[1], []) + (BACKBONE if "ridge" in words else [])
        words = [str(Path(sys.executable).with_name("oneshot")), *words[1:], *added]
    places = {"ONESHOT_RUNS": str(folder / "runs"), "ONESHOT_CLIENT_STATE": str(folder / "state")}
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **places, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
