"""Looks at a page in headless Chromium, where it is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (400, 1400)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
    "--hide-scrollbars", "--window-size=1500,2000", "--virtual-time-budget=15000", "--dump-dom",
)  # fmt: skip
# Each width is a frame of its own, because a window has a least width.
_FRAME = '<iframe width="{width}" height="900" style="border: 0" srcdoc="{page}"></iframe>'
_PROBE = """<script>onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(f => {
  const d = f.contentDocument;
  return [d.documentElement.scrollWidth, d.documentElement.clientWidth, d.images.length,
    [...d.images].filter(i => i.naturalWidth > 0).length]; })); };</script>"""


@dataclass(frozen=True)
class Look:
    """A page at one width: the width of its content and of its window in pixels, its images, and those shown."""

    content: int
    window: int
    images: int
    shown: int


def look_at(page: Path, folder: Path) -> tuple[list[Look], list[str]]:
    """Return the page at each of ``WIDTHS``, and the messages of the browser's console."""
    folder.mkdir()
    text = html.escape(page.read_text())
    frames = "".join(_FRAME.format(width=width, page=text) for width in WIDTHS)
    outer = folder / "outer.html"
    outer.write_text(f'<!doctype html><meta charset="utf-8"><title></title>{frames}{_PROBE}')
    shown, errors = opened(outer.as_uri(), folder)
    measured = re.search(r"<title>(.*?)</title>", shown)
    return [Look(*numbers) for numbers in json.loads(html.unescape(measured[1]))], errors


def opened(address: str, folder: Path) -> tuple[str, list[str]]:
    """Return a page as its scripts have made it, and the messages of the browser's console."""
    command = [str(CHROMIUM), *_FLAGS, f"--user-data-dir={folder / 'profile'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def check_looks(page: Path, folder: Path, *, images: int) -> None:
    """Hold a page to what a reader needs at every width: all its images, no overflow, no error of the console."""
    looks, errors = look_at(page, folder)

    assert errors == []
    assert [look.window for look in looks] == list(WIDTHS)
    for look in looks:
        assert look.content <= look.window
        assert look.shown == look.images == images
