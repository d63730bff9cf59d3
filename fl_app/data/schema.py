"""The schema of tables: what all clients agree on before any of them reads its rows.

``schema.toml`` names the classes and the columns. A row becomes features by the schema alone: a number x becomes
(x - mean) / deviation with the agreed constants, and a category one dummy per agreed level. So no statistic of any row
leaves a client, and equal rows of two clients are equal features.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.core.errors import OptionError
from strategies.core.toml import read_toml_file

SCHEMA_FILE = "schema.toml"
MISSING = ("", "?", "NA")  # cells of the files that hold no value
_NUMERIC, _CATEGORICAL = ("mean", "deviation", "missing"), ("levels", "missing")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its name in the head of the files.
        levels: The levels of a category; empty for a number.
        mean: The number that becomes 0.
        deviation: The difference that becomes 1; greater than 0.
        missing: Stands for a missing value, a number or one of the levels; None refuses missing values.
    """

    name: str
    levels: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0
    missing: float | str | None = None


@dataclass(frozen=True)
class Schema:
    """The classes and columns of all clients' tables.

    Attributes:
        classes: The words of the label's column, in the order of the classes.
        columns: In the order of the features.
        sha256: Of the file.
    """

    classes: tuple[str, ...]
    columns: tuple[Column, ...]
    sha256: str

    @property
    def features(self) -> int:
        """F: one per number, and one per level of a category."""
        return sum(len(column.levels) or 1 for column in self.columns)


def read_schema(file: Path, sha256: str = "") -> Schema:
    """Read a schema.

    Args:
        file: A TOML file with ``classes``, a list, and a table ``columns.<name>`` for each column. A table with
            ``levels`` is a category, any other a number with ``mean`` (0) and ``deviation`` (1); ``missing`` is
            optional.
        sha256: The digest that the file must have; empty for any.

    Raises:
        OptionError: The file is missing, is no schema, or has another digest.
    """
    found = read_toml_file(file, "schema")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 not in ("", digest):
        raise OptionError(f"setting 'data.schema-sha256' is {sha256!r}, but that of {file} is {digest}: must be equal")
    where = f"schema {file}"
    if unknown := sorted(set(found) - {"classes", "columns"}):
        raise OptionError(f"{where} has {unknown[0]!r}: must have classes and columns alone")
    classes = _words(found.get("classes"), f"{where}: classes")
    _refuse_unreadable(classes, f"{where}: classes")
    columns = found.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise OptionError(f"{where}: columns is {type(columns).__name__}: must be a table [columns.NAME] per column")
    return Schema(classes, tuple(_column(name, facts, where) for name, facts in columns.items()), digest)


def _column(name: str, facts: Any, where: str) -> Column:
    where = f"{where}: column {name!r}"
    if not isinstance(facts, dict):
        raise OptionError(f"{where} is {type(facts).__name__}: must be a table, such as [columns.{name}]")
    known = _CATEGORICAL if "levels" in facts else _NUMERIC
    if unknown := sorted(set(facts) - set(known)):
        raise OptionError(f"{where} has {unknown[0]!r}: must be among {', '.join(known)}")
    if "levels" in facts:
        levels = _words(facts["levels"], f"{where}: levels")
        missing = str(facts["missing"]) if "missing" in facts else None
        _refuse_unreadable([level for level in levels if level != missing], f"{where}: levels")
        if missing is not None and missing not in levels:
            raise OptionError(f"{where}: missing is {missing!r}: must be one of its levels, {', '.join(levels)}")
        return Column(name, levels, missing=missing)
    numbers = {key: _number(facts, key, where) for key in facts}
    if numbers.get("deviation", 1.0) <= 0:
        raise OptionError(f"{where}: deviation is {facts['deviation']!r}: must be greater than 0")
    return Column(name, **numbers)  # type: ignore[arg-type]


def _words(found: Any, what: str) -> tuple[str, ...]:
    words = tuple(map(str, found)) if isinstance(found, list) else ()
    if len(words) < 2 or len(set(words)) != len(words):
        raise OptionError(f"{what} is {str(found)[:200]}: must be a list of at least two different words")
    return words


def _refuse_unreadable(words: Sequence[str], what: str) -> None:
    """Refuse a word that no cell can hold, because it means a missing value there."""
    if unreadable := [word for word in words if word in MISSING]:
        raise OptionError(f"{what} has {unreadable[0]!r}, which is a missing value in the files: must be another word")


def _number(facts: Mapping[str, Any], key: str, where: str) -> float:
    value = facts[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{where}: {key} is {value!r}: must be a number")
    return float(value)
