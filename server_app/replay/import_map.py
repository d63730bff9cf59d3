"""The checkpoints in a folder, with their names, and with the facts from a map file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strategies.core.durable import store_errors
from strategies.core.errors import OptionError, blaming
from strategies.core.facts import UploadFacts
from strategies.core.options import is_own
from strategies.core.toml import read_toml_file
from strategies.uploads.checks import CLIENT_NAME, check_facts, check_num_examples, some

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
# The map file's table for files without one of their own; no checkpoint has this name, because it has no suffix.
_KEYS = "keys"
_FACTS = ("name", "architecture", "num-examples", "label-counts", _KEYS)


@dataclass(frozen=True)
class Entry:
    """A checkpoint to import.

    Attributes:
        path: The file.
        facts: The known facts of its upload, with its client name.
        keys: Prefix of its tensors' names -> prefix of the architecture's own names.
    """

    path: Path
    facts: UploadFacts
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """The server's architectures and classes, which the map file has to fit.

    Attributes:
        architectures: Names of the architectures that take the data set's images.
        num_classes: C.
    """

    architectures: Collection[str]
    num_classes: int


def list_checkpoints(folder: Path, map_file: Path | None, *, architecture: str, known: Known) -> list[Entry]:
    """List the checkpoints of a folder, without its subfolders, by file name; no file is opened.

    Args:
        folder: The folder.
        map_file: A TOML file: a table per file name with ``name``, ``architecture``, ``num-examples``,
            ``label-counts`` and ``keys``, all optional. A table ``keys`` holds for the files without their own. None
            for no map.
        architecture: The architecture of files without one in the map.
        known: The server's architectures and classes.

    Raises:
        OptionError: There are no checkpoints, the map is invalid, or two files give the same client name.
        UploadError: A number in the map is invalid.
        StoreError: The folder cannot be read.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder: must be one that holds checkpoints ({', '.join(SUFFIXES)})")
    with store_errors(folder):
        files = sorted(path for path in folder.iterdir() if _is_checkpoint(path))
    if not files:
        raise OptionError(f"{folder} holds no checkpoints: must be files that end in {', '.join(SUFFIXES)}")
    tables = {} if map_file is None else _read_map(map_file, [path.name for path in files])
    shared = tables.get(_KEYS, {})
    entries = [
        _entry(
            path,
            {"architecture": architecture, _KEYS: shared, **tables.get(path.name, {})},
            known,
            where=f"{path}:" if map_file is None else _where(map_file, path.name),
        )
        for path in files
    ]
    _refuse_same_names(entries)
    return entries


def own_architectures(map_file: Path | None) -> list[str]:
    """Return the architectures of the user's own code that a map names, each once.

    Raises:
        OptionError: The map cannot be read.
    """
    tables = {} if map_file is None else read_toml_file(map_file, "map")
    named = [table.get("architecture") for table in tables.values() if isinstance(table, dict)]
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and is_own(name)))


def _is_checkpoint(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _read_map(map_file: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    tables = read_toml_file(map_file, "map")
    for name, table in tables.items():
        if name not in (*names, _KEYS):
            hint = f'; names with dots are quoted, ["{name}.pt"]' if not Path(name).suffix else ""
            raise OptionError(f"map {map_file} names {name!r}: must be the checkpoints {some(names)}{hint}")
        if not isinstance(table, dict):
            raise OptionError(f"map {map_file}: {name!r} is {type(table).__name__}: must be a table of facts")
        if name != _KEYS and (unknown := sorted(set(table) - set(_FACTS))):
            raise OptionError(f"{_where(map_file, name)} has {unknown[0]!r}: must be {', '.join(_FACTS)}")
    return tables


def _entry(path: Path, facts: Mapping[str, Any], known: Known, *, where: str) -> Entry:
    if facts["architecture"] not in known.architectures:
        raise OptionError(
            f"{where} architecture is {facts['architecture']!r}: must be {', '.join(known.architectures)}"
        )
    client = _client_name(path, facts.get("name"), where)
    with blaming(where.removesuffix(":")):
        given = {**facts, "pretrained": True}
        found = check_facts(given, known.num_classes, client=client, architecture=facts["architecture"])
    if found.label_counts is not None:
        total = check_num_examples(sum(found.label_counts), f"the sum of {where} label-counts")
        found = replace(found, num_examples=total)
    return Entry(path, found, _prefixes(facts[_KEYS], where))


def _where(map_file: Path, name: str) -> str:
    return f'map {map_file}, ["{name}"]:'


def _client_name(path: Path, named: object, where: str) -> str:
    if named is None:
        # A character that a client name must not hold becomes a dash; a name begins with a letter or a digit.
        fitted = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:64]
        if not fitted:
            raise OptionError(f"{path}: no client name follows from this file name; give it one by name in --map")
        return fitted
    if not isinstance(named, str) or not CLIENT_NAME.fullmatch(named):
        raise OptionError(f"{where} name is {str(named)[:80]!r}: must match {CLIENT_NAME.pattern}")
    return named


def _prefixes(keys: object, where: str) -> dict[str, str]:
    if not isinstance(keys, dict):
        raise OptionError(f"{where} keys is {type(keys).__name__}: must be a table, old prefix -> new prefix")
    for old, new in keys.items():
        if not isinstance(new, str):
            raise OptionError(
                f"{where} keys has {old!r} = {type(new).__name__}: must be a text, old prefix -> new prefix; "
                f'prefixes with dots are quoted, "{old}." = ""'
            )
    return keys


def _refuse_same_names(entries: Sequence[Entry]) -> None:
    taken: dict[str, Entry] = {}
    for entry in entries:
        if (other := taken.setdefault(entry.facts.client, entry)) is not entry:
            raise OptionError(
                f"{other.path.name} and {entry.path.name} both give the client name {entry.facts.client!r}: must be "
                "one file per name; give one of them another by name in --map"
            )
