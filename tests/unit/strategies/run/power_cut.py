"""What a disk may hold after a power cut at any moment, by the order that POSIX promises and no other.

A file holds what it held at its last fsync, or any later content, whole or torn. Every name in a folder stands for what
it stood for at the folder's last fsync, or for anything later, each name by itself.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

Inode = int
Names = dict[str, Inode]

# The calls after which, and before which, the power may be cut.
CALLS = ("fsync", "replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir")
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}


@dataclass
class Moment:
    """What may be on the disk at one moment.

    Attributes:
        names: Folder -> name -> what the name may stand for; None for nothing.
        contents: File -> what the file may hold.
    """

    names: dict[Inode, dict[str, set[Inode | None]]]
    contents: dict[Inode, list[bytes]]

    def draw(
        self, most: int, rng: random.Random
    ) -> Iterator[tuple[dict[tuple[Inode, str], Inode | None], dict[Inode, bytes]]]:
        """Yield every combination, or ``most`` of them by chance if there are more."""
        entries = [
            (folder, name, sorted(found, key=str))
            for folder, names in self.names.items()
            for name, found in names.items()
        ]
        files = list(self.contents.items())
        choices = [options for _, _, options in entries] + [options for _, options in files]
        if prod(len(options) for options in choices) <= most:
            drawn: Iterator[Any] = product(*choices)
        else:
            drawn = ([rng.choice(options) for options in choices] for _ in range(most))
        for picked in drawn:
            chosen = dict(zip([(folder, name) for folder, name, _ in entries], picked, strict=False))
            held = dict(zip([inode for inode, _ in files], picked[len(entries) :], strict=True))
            yield chosen, held


@dataclass
class PowerCuts:
    """Watches a folder during a block, before which all of it is on the disk, and makes what power cuts may leave."""

    root: Path
    moments: list[Moment] = field(default_factory=list)
    _synced: dict[Inode, bytes] = field(default_factory=dict)
    _listed: dict[Inode, dict[str, set[Inode | None]]] = field(default_factory=dict)
    _folders: dict[Inode, Names] = field(default_factory=dict)
    _files: dict[Inode, bytes] = field(default_factory=dict)
    _kept: dict[Inode, int] = field(default_factory=dict)  # open handles, so that no inode's number is used again
    _top: Inode = 0

    def __enter__(self) -> PowerCuts:
        self._look()
        self._top = self.root.stat().st_ino
        self._synced = dict(self._files)
        self._listed = {
            inode: {name: {found} for name, found in names.items()} for inode, names in self._folders.items()
        }
        for name in CALLS:
            setattr(os, name, self._around(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, real in _REAL.items():
            setattr(os, name, real)
        self._note()
        for handle in self._kept.values():
            os.close(handle)

    def folders(self, target: Path, *, most: int, last: bool = False) -> Iterator[Path]:
        """Make the folders that a power cut may leave, one after the other, all different."""
        rng, seen = random.Random(0), set()
        for moment in self.moments[-1:] if last else self.moments:
            for chosen, held in moment.draw(most, rng):
                tree = tuple(sorted(_paths(self._top, chosen, held)))
                if tree not in seen:
                    seen.add(tree)
                    yield _made(target / str(len(seen)), tree)

    def _around(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note()
            found = _REAL[name](*args, **kwargs)
            if name == "fsync":
                self._sync(os.fstat(args[0]))
            self._note()
            return found

        return call

    def _sync(self, status: os.stat_result) -> None:
        self._look()
        if stat.S_ISDIR(status.st_mode):
            names = self._folders.get(status.st_ino, {})
            self._listed[status.st_ino] = {name: {found} for name, found in names.items()}
        else:
            self._synced[status.st_ino] = self._files.get(status.st_ino, b"")

    def _note(self) -> None:
        """Add what each name and file is now to what they may be."""
        self._look()
        for inode, names in self._folders.items():
            listed = self._listed.setdefault(inode, {})
            for name in {*listed, *names}:
                listed.setdefault(name, {None}).add(names.get(name))
        contents = {inode: _torn(self._synced.get(inode), data) for inode, data in self._files.items()}
        names_now = {
            inode: {name: set(found) for name, found in names.items()} for inode, names in self._listed.items()
        }
        moment = Moment(names_now, contents)
        if not self.moments or moment != self.moments[-1]:
            self.moments.append(moment)

    def _look(self) -> None:
        self._folders = {}
        pending = [self.root]
        while pending:
            folder = pending.pop()
            names: Names = {}
            with os.scandir(folder) as entries:
                for entry in entries:
                    names[entry.name] = entry.inode()
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                    else:
                        self._files[entry.inode()] = Path(entry.path).read_bytes()
                    if entry.inode() not in self._kept:
                        self._kept[entry.inode()] = os.open(entry.path, os.O_RDONLY)
            self._folders[folder.stat().st_ino] = names


def _torn(synced: bytes | None, now: bytes) -> list[bytes]:
    """Return what a file may hold that held ``synced`` at its last fsync and holds ``now``."""
    if synced == now:
        return [now]
    before = synced or b""
    start = len(before) if now.startswith(before) else 0
    half = (start + len(now)) // 2
    found = [before, now, now[:half], now[:start] + bytes(len(now) - start), now[:half] + bytes(len(now) - half)]
    found.append(now[:start] + bytes(half - start) + now[half:])
    return list(dict.fromkeys(found))


def _paths(
    folder: Inode, chosen: dict[tuple[Inode, str], Inode | None], held: dict[Inode, bytes], above: str = ""
) -> Iterator[tuple[str, bytes | None]]:
    for (inside, name), inode in chosen.items():
        if inside == folder and inode is not None:
            path = f"{above}{name}"
            if inode in held:
                yield path, held[inode]
            else:
                yield path, None
                yield from _paths(inode, chosen, held, f"{path}/")


def _made(folder: Path, tree: tuple[tuple[str, bytes | None], ...]) -> Path:
    folder.mkdir(parents=True)
    for path, data in tree:
        if data is None:
            (folder / path).mkdir(exist_ok=True)
        else:
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(data)
    return folder
