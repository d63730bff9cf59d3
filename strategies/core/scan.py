"""The files of a folder: which ones are taken, and which are left out, by count and first names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from logging import INFO, WARNING, getLogger
from pathlib import Path

from .errors import one_line, shorten_list

# What file managers, notebooks, network drives and archives leave beside the files of a folder.
TOOLS = frozenset({
    "__macosx", "__pycache__", "@eadir", "@recycle", "@recently-snapshot", "@__thumb", "#recycle", "#snapshot",
    "$recycle.bin", "lost+found", "system volume information", "thumbs.db", "desktop.ini",
})  # fmt: skip
# Files that a file manager writes into every folder, and that nobody looks for.
_MARKS = (".ds_store", "thumbs.db", "desktop.ini", ".localized", ".directory")

# Flower's own logger, so that its lines reach the log of a run, and of a node.
LOG = getLogger("flwr")


@dataclass(frozen=True)
class Scan:
    """The files of a folder.

    Attributes:
        hidden: Files that are hidden, or lie in a hidden folder or one of :data:`TOOLS`.
    """

    folder: Path
    taken: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()

    @property
    def left_out(self) -> str:
        """How many files are left out, with the first names, as a clause; empty if none are."""
        parts = []
        if self.others:
            kinds = Counter("folder" if p.is_dir() else p.suffix.lower() or "no suffix" for p in self.others)
            shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
            parts.append(f"{_files(self.others)} ({shown}): {self._names(self.others)}")
        if self.hidden:
            parts.append(f"{_files(self.hidden)} that are hidden or a tool's: {self._names(self.hidden)}")
        return "; ".join(parts)

    def report(self, what: str) -> None:
        """Log what was taken and what was left out, once per process for one state of a folder.

        Args:
            what: The kind of the files that were looked for, a plural.
        """
        left = self.left_out
        level = WARNING if self.others or any(path.name.lower() not in _MARKS for path in self.hidden) else INFO
        log_once(level, f"{self.folder}: {len(self.taken)} {what}{f'; left out are {left}' if left else ''}")

    def _names(self, paths: Sequence[Path]) -> str:
        return shorten_list([str(path.relative_to(self.folder)) for path in paths])


def scan(folder: Path, takes: Callable[[Path], bool], *, deep: bool = False) -> Scan:
    """Look through a folder.

    Args:
        takes: Whether a file that is not hidden is looked for.
        deep: Look into subfolders too; else they are left out, each as one.

    Raises:
        OSError: A folder cannot be read.
    """
    taken, others, hidden = list[Path](), list[Path](), list[Path]()
    for path in _below(folder) if deep else sorted(folder.iterdir()):
        if any(map(is_hidden, path.relative_to(folder).parts)):
            hidden.append(path)
        else:
            (taken if path.is_file() and takes(path) else others).append(path)
    return Scan(folder, tuple(taken), tuple(others), tuple(hidden))


def is_hidden(name: str) -> bool:
    """Say whether a file or folder is hidden, or one that a tool leaves."""
    return name.startswith((".", "~$")) or name.lower() in TOOLS


def has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    """Say whether a file's name ends in one of these, whatever its case; a suffix may have two parts, ``.csv.gz``."""
    return path.name.lower().endswith(tuple(suffixes))


def without_suffix(path: Path, suffixes: Sequence[str]) -> str:
    """Return a file's name without the longest of these that it ends in."""
    own = max((each for each in suffixes if path.name.lower().endswith(each)), key=len, default="")
    return path.name[: len(path.name) - len(own)]


def _below(folder: Path) -> list[Path]:
    """Return all files below a folder, by folder and name; a folder that links lead to twice is read once."""
    seen, found = set[tuple[int, int]](), list[tuple[str, list[str]]]()
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        status = Path(root).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        found.append((root, sorted(names)))
    return [Path(root) / name for root, names in sorted(found) for name in names]


def _raise(error: OSError) -> None:
    raise error


def _files(paths: Sequence[Path]) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"


@cache
def log_once(level: int, line: str) -> None:
    """Log a line that this process has not logged before; it may have names of files, or of a client's records."""
    LOG.log(level, "%s", one_line(line))
