"""The hooks of the documentation's site: pages from outside ``docs/``, links that leave it, and the API's reference.

They also add the script by which the search works in pages that are opened as files.

MkDocs calls them by name (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Files outside docs/ that are pages of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "deploy.md",
}
# Packages of the reference; of the library one page per room.
PACKAGES = ("fl_app", "client_app")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~)")


def rooms() -> dict[str, list[str]]:
    """Return page -> its modules: the files of the library, its rooms, and the packages of the app."""
    found = {"reference/strategies.md": [ROOT / "strategies"]}
    folders = [
        path for path in sorted((ROOT / "strategies").rglob("__init__.py")) if path.parent != ROOT / "strategies"
    ]
    found |= {f"reference/{'.'.join(path.parent.relative_to(ROOT).parts)}.md": [path.parent] for path in folders}
    found |= {f"reference/{name}.md": [ROOT / name, *_below(ROOT / name)] for name in PACKAGES}
    return {page: modules for page, places in found.items() if (modules := list(_modules(places)))}


def _below(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("__init__.py") if path.parent != folder)


def _modules(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def reference(page: str, modules: list[str]) -> str:
    """Return the text of a page of the reference."""
    title = Path(page).stem
    return f"# `{title}`\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"


def site_links(text: str, source: Path, page: str) -> str:
    """Return a page's text whose links lead to pages of the site; a link to another file becomes its text.

    Args:
        text: Markdown.
        source: The file that it is written in, whose links are relative to it.
        page: The page of the site that it becomes, relative to ``docs/``.
    """

    def placed(found: re.Match[str]) -> str:
        target, hash_, anchor = found[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        file = (source.parent / target).resolve()
        if not file.is_relative_to(ROOT):
            return found[1]
        place = OUTSIDE.get(file.relative_to(ROOT).as_posix())
        if place is None and file.is_relative_to(ROOT / "docs") and file.suffix in (".md", ".svg"):
            place = file.relative_to(ROOT / "docs").as_posix()
        return (
            found[1] if place is None else f"[{found[1]}]({os.path.relpath(place, Path(page).parent)}{hash_}{anchor})"
        )

    lines, fenced = [], False
    for line in text.split("\n"):
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else LINK.sub(placed, line))
    return "\n".join(lines)


def on_config(config: Any) -> Any:
    """Complete the navigation by the pages of the methods and of the lab, and by the reference."""
    for title, folder in (("Methods", "methods"), ("Lab", "lab")):
        pages = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md") if path.name != "README.md")
        for part in config.nav:
            if title in part:
                part[title] += [f"{folder}/{name}" for name in pages]
    config.nav.append({"Reference": list(rooms())})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and the script that are not files in ``docs/``."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    worker = "assets/iframe-worker.js"
    files.append(File.generated(config, worker, content=Path(__file__).with_name("iframe-worker.js").read_text()))
    for page, modules in rooms().items():
        files.append(File.generated(config, page, content=reference(page, modules)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    own = page.file.src_uri
    source = next((name for name, place in OUTSIDE.items() if place == own), f"docs/{own}")
    return markdown if own.startswith("reference/") else site_links(markdown, ROOT / source, own)
