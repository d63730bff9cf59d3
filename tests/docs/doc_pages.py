"""The pages that people read, taken apart: code blocks, commands, tables, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy/README.md",
]
CONF = sorted((ROOT / "conf").glob("*.toml"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands that a reader is given, of which nothing here is checked.
PLAIN = {"cd", "export", "python3", "source"}
PLAIN |= {"chown", "cp", "docker", "install", "pip", "journalctl", "mkdir", "scp", "systemctl", "useradd"}
COMMANDS = {"oneshot", "make", "flwr", "flower-superlink", "flower-supernode", "python", *PLAIN}


def name_of(path: Path) -> str:
    """Return a page's name, for the ids of tests."""
    return str(path.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the contents of a page's fenced blocks in these languages."""
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def section(page: Path, heading: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    level = heading.split(" ", 1)[0]
    _, _, rest = page.read_text().partition(f"\n{heading}\n")
    assert rest, f"{name_of(page)} has no heading {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose first column is headed ``first``, without code marks."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.replace("`", "").startswith(f"| {first} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return found


def commands(page: Path) -> Iterator[list[str]]:
    """Yield every command that a page shows, in words: of its console blocks, and inline ones that name a program."""
    if page.suffix == ".toml":
        shown = "\n".join(re.findall(r"^#   (.*)$", page.read_text(), re.MULTILINE))
        inline: list[str] = []
    else:
        shown = "\n".join(blocks(page, "console", "bash", "sh"))
        # Two words name a command, more show how it is used.
        inline = re.findall(r"`((?:oneshot \w+|make|flwr run) [^`]+)`", prose(page))
    for line in [*shown.replace("\\\n", " ").splitlines(), *inline]:
        words = shlex.split(line.replace("$RUN", "runs/example").replace(" 2> run.log", ""), comments=True)
        words = [word.removeprefix(".venv/bin/") for word in words]
        if words and not re.match(r"\w+=", words[0]):
            yield words
