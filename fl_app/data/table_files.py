"""Tables of one's own as CSV or Parquet files, encoded by the schema that all clients agree on.

A folder holds ``schema.toml``, ``test.csv``, and the training rows: ``train/<client>.csv``, a file per client, or
``train.csv``, of one client or with a column that names the client. A CSV file may also be ``.tsv``, with tabs, and
compressed, ``.csv.gz``; Parquet files have the ending ``.parquet``. A CSV file begins with the names of its columns.
Empty fields, ``?`` and ``NA`` are missing values.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fl_app.node_config import client_name
from strategies.core.checkpoints import other_kind
from strategies.core.errors import DataError, OptionError
from strategies.core.scan import Scan, has_suffix, log_once, scan, without_suffix
from strategies.core.toml import read_toml_file

from .csv_text import PACKED, decimal_points, read_csv, unpacked
from .files import composed

if TYPE_CHECKING:
    import pandas as pd


# The schema of tables: what all clients agree on before any of them reads its rows.
#
# ``schema.toml`` names the classes and the columns. A row becomes features by the schema alone: a number x becomes (x
# - mean) / deviation with the agreed constants, and a category one dummy per agreed level. So no statistic of any row
# leaves a client, and equal rows of two clients are equal features.


SCHEMA_FILE = "schema.toml"
MOST_NAMED = 64  # clients whose names a line of the log has
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

    @property
    def words(self) -> str:
        """How the column becomes features, as all parties must have it."""
        kind = (
            f"one of {', '.join(self.levels)}" if self.levels else f"mean {self.mean:g}, deviation {self.deviation:g}"
        )
        return f"{self.name}: {kind}" + ("" if self.missing is None else f", missing values are {self.missing}")


@dataclass(frozen=True)
class Schema:
    """The classes and columns of all clients' tables.

    Attributes:
        classes: The words of the label's column, in the order of the classes; empty where it holds numbers.
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
        file: A TOML file with ``classes``, a list, if the label's column holds any, and a table ``columns.<name>`` for
            each column. A table with ``levels`` is a category, any other a number with ``mean`` (0) and ``deviation``
            (1); ``missing`` is optional.
        sha256: The digest that the file must have; empty for any.

    Raises:
        OptionError: The file is missing, is no schema, or has another digest.
    """
    if not file.exists():
        raise OptionError(f"schema {file} is missing: must be the file of classes and columns that all parties share")
    found = read_toml_file(file, "schema")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 not in ("", digest):
        raise OptionError(f"setting 'data.schema-sha256' is {sha256!r}, but that of {file} is {digest}: must be equal")
    where = f"schema {file}"
    if unknown := sorted(set(found) - {"classes", "columns"}):
        raise OptionError(f"{where} has {unknown[0]!r}: must have classes and columns alone")
    classes = _words(found["classes"], f"{where}: classes") if "classes" in found else ()
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
        missing = composed(str(facts["missing"])) if "missing" in facts else None
        _refuse_unreadable([level for level in levels if level != missing], f"{where}: levels")
        if missing is not None and missing not in levels:
            raise OptionError(f"{where}: missing is {missing!r}: must be one of its levels, {', '.join(levels)}")
        return Column(name, levels, missing=missing)
    numbers = {key: _number(facts, key, where) for key in facts}
    if numbers.get("deviation", 1.0) <= 0:
        raise OptionError(f"{where}: deviation is {facts['deviation']!r}: must be greater than 0")
    return Column(name, **numbers)  # type: ignore[arg-type]


def _words(found: Any, what: str) -> tuple[str, ...]:
    words = tuple(composed(str(each)) for each in found) if isinstance(found, list) else ()
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


CSV, PARQUET = "csv", "parquet"
TABLE_FORMS = (CSV, PARQUET)  # values of the setting data.name
# Value of data.name -> the suffixes of its files, compared without case.
SUFFIXES = {
    CSV: tuple(kind + packed for kind in (".csv", ".tsv", ".tab") for packed in ("", *PACKED)),
    PARQUET: (".parquet", ".parq", ".pq"),
}


class TableHalf(NamedTuple):
    """One half of the tables.

    Attributes:
        labels: int64 [N]; zeros where the label's column holds numbers.
        rows: float32 [N, F, 1, 1].
        holders: The client of each training row, int64 [N], by the order of the clients' names; zeros of the test half.
        by_client: Whether the files say which client holds which row.
        groups: The group of each row, int64 [N]; None if each is its own, as those of a test half without the column.
        targets: The numbers of the label's column, float32 [N, 1]; None where it holds classes.
    """

    labels: torch.Tensor
    rows: torch.Tensor
    holders: torch.Tensor
    by_client: bool
    groups: torch.Tensor | None = None
    targets: torch.Tensor | None = None


def open_tables(
    folder: Path, split: str, *, form: str, label: str, client: str = "", group: str = "", schema: Schema
) -> TableHalf:
    """Open one half of the tables.

    Args:
        split: ``"train"`` or ``"test"``.
        form: One of :data:`TABLE_FORMS`.
        client: The column that names each training row's client; empty for a file per client, or one client.
        group: The column that names each training row's group, such as its patient; empty: each row is its own.

    Raises:
        OptionError: The package that reads Parquet is not installed.
        DataError: A file or a column is missing, or a value has another type, level or class; names file, column and
            line, or row of a Parquet file.
    """
    if split == "test":
        if not (found := _named(folder, "test", form).taken):
            raise DataError(f"{folder / f'test.{form}'} is missing: must be the test rows (data.root)")
        files, by_client = [found[0]], False
    else:
        files = _training_files(folder, form, client)
        by_client = bool(client) or files[0].parent != folder
    wanted = [composed(name) for name in (label, client, group, *(column.name for column in schema.columns)) if name]
    frames = [_read(file, wanted) for file in files]
    learned = _labels if schema.classes else _numbers
    labels = torch.cat([learned(frame, label, schema, file) for frame, file in zip(frames, files, strict=True)])
    rows = torch.cat([encoded(frame, schema, file) for frame, file in zip(frames, files, strict=True)])
    targets = None if schema.classes else labels
    labels = labels if schema.classes else torch.zeros(len(rows), dtype=torch.int64)  # of one kind, for the division
    if client and split == "train":
        holders, names = _codes(frames[0], client, files[0], "client")
    else:
        holders = torch.repeat_interleave(torch.tensor([len(frame) for frame in frames]))
        names = [without_suffix(file, SUFFIXES[form]) for file in files]
    if len(names) > 1:
        _name_clients(files[0] if client else files[0].parent, names)
    groups = None
    if group and (split == "train" or all(group in frame for frame in frames)):
        groups = torch.cat([_codes(frame, group, file, "group")[0] for frame, file in zip(frames, files, strict=True)])
    elif group:
        log_once(WARNING, f"{files[0]} has no column {group!r} (data.group): intervals of scores count its rows")
    return TableHalf(labels, rows, holders, by_client, groups, targets)


def schema_of(folder: Path, *, label: str, sha256: str = "", numbers: bool = False) -> Schema:
    """Return the schema of a folder of tables; the label is none of its columns.

    Args:
        numbers: Whether the label's column may hold numbers, so that the schema may name no classes.

    Raises:
        OptionError: The schema is missing or wrong.
    """
    schema = read_schema(folder / SCHEMA_FILE, sha256)
    if label in [column.name for column in schema.columns]:
        raise OptionError(f"setting 'data.label' is {label!r}: must be a column that {SCHEMA_FILE} does not have")
    if not (schema.classes or numbers):
        raise OptionError(
            f"schema {folder / SCHEMA_FILE} has no classes: if column {label!r} holds numbers, 'model.train' must name "
            "a function that learns them; for a ridge regression set method=fedavg, model.name, model.train and "
            "model.evaluate as docs/methods/ridge.md shows. If it holds classes, the schema must name them"
        )
    return schema


def encoded(frame: pd.DataFrame, schema: Schema, file: Path) -> torch.Tensor:
    """Return a table's features, float32 [N, F, 1, 1], each row by itself.

    Raises:
        DataError: See :func:`open_tables`.
    """
    import pandas as pd

    separator = frame.attrs.get("separator", ",")
    if separator != ",":
        _refuse_two_decimals(frame, schema, file)
    parts = [_features(_column_of(frame, column.name, file), column, file, separator) for column in schema.columns]
    rows = pd.concat(parts, axis="columns").to_numpy("float32", copy=True)  # a view of pandas is read-only
    return torch.from_numpy(rows)[:, :, None, None]


def _refuse_two_decimals(frame: pd.DataFrame, schema: Schema, file: Path) -> None:
    """Refuse a file with decimal commas in one column and points in another, which may stand between thousands."""
    numbers = [column.name for column in schema.columns if not column.levels]
    marked = {",": "", ".": ""}
    for name in numbers:
        cells = _column_of(frame, name, file).dropna().astype(str)
        marked |= {mark: name for mark in marked if cells.str.contains(mark, regex=False).any()}
    if marked[","] and marked["."] and marked[","] != marked["."]:  # of one column its own check says more
        raise DataError(
            f"{file} has numbers with a comma in column {marked[',']!r} and with a point in column {marked['.']!r}: "
            "must have points or decimal commas, not both, and nothing between thousands"
        )


def _features(values: pd.Series[str], column: Column, file: Path, separator: str) -> pd.DataFrame:
    import pandas as pd

    if values.isna().any() and column.missing is None:
        what = f"must be filled in, or column {column.name!r} of {SCHEMA_FILE} must say what stands for 'missing'"
        raise DataError(f"{_place(values.isna(), column.name, file)} no value: {what}")
    if column.levels:
        filled = _as_words(values if column.missing is None else values.fillna(str(column.missing)), column.levels)
        if (wrong := ~filled.isin(column.levels)).any():
            allowed = f"must be one of {', '.join(column.levels)}"
            raise DataError(f"{_place(wrong, column.name, file)} {str(filled[wrong].iloc[0])[:80]!r}: {allowed}")
        return pd.get_dummies(pd.Categorical(filled, categories=column.levels), dtype=float)
    there = values.dropna()
    try:
        texts = pd.Series(decimal_points(there.tolist(), separator), there.index, object).reindex(values.index)
    except ValueError as error:
        raise DataError(f"{file}, column {column.name!r}: {error}") from error
    numbers = pd.to_numeric(texts, errors="coerce").replace([float("inf"), float("-inf")], float("nan"))
    if (wrong := numbers.isna() & values.notna()).any():
        raise DataError(f"{_place(wrong, column.name, file)} {str(values[wrong].iloc[0])[:80]!r}: must be a number")
    filled_numbers = numbers if column.missing is None else numbers.fillna(float(column.missing))
    scaled = (filled_numbers - column.mean) / column.deviation
    if (wrong := scaled.abs() > torch.finfo(torch.float32).max).any():
        value = str(values[wrong].iloc[0])[:80]
        raise DataError(f"{_place(wrong, column.name, file)} {value!r}: must be a number that float32 can hold")
    return scaled.to_frame()


def _labels(frame: pd.DataFrame, label: str, schema: Schema, file: Path) -> torch.Tensor:
    import pandas as pd

    values = _as_words(_column_of(frame, label, file), schema.classes)
    codes = pd.Index(schema.classes).get_indexer(pd.Index(values))  # -1: none of them
    if (wrong := pd.Series(codes == -1)).any():
        value = values[wrong].iloc[0]
        shown = "no value" if pd.isna(value) else repr(str(value)[:80])
        raise DataError(f"{_place(wrong, label, file)} {shown}: must be one of {', '.join(schema.classes)}")
    return torch.from_numpy(codes.astype("int64"))


def _numbers(frame: pd.DataFrame, label: str, schema: Schema, file: Path) -> torch.Tensor:
    """Return the numbers of a column, float32 [N, 1]."""
    if (missing := _column_of(frame, label, file).isna()).any():
        raise DataError(f"{_place(missing, label, file)} no value: must be a number")
    return encoded(frame, replace(schema, columns=(Column(label),)), file)[:, :, 0, 0]


def _as_words(values: pd.Series[str], words: Sequence[str]) -> pd.Series[str]:
    """Return cells as the words that mean the same: 1.0 and 1, 0.50 and 0.5, TRUE and True, as programs write them."""
    counts = Counter(map(_meaning, words))
    of = {_meaning(word): word for word in words if counts[_meaning(word)] == 1}
    found = {cell: of.get(_meaning(cell), cell) for cell in values.dropna().unique() if cell not in words}
    return values.replace(found) if found else values


def _meaning(word: str) -> str:
    if word.lower() in ("true", "false"):
        return word.lower()
    return word.rstrip("0").rstrip(".") if re.fullmatch(r"-?\d+\.\d+", word) else word


def _codes(frame: pd.DataFrame, column: str, file: Path, what: str) -> tuple[torch.Tensor, list[str]]:
    """Return the number of each row's client or group, int64 [N], and the names by their numbers; 7.0 is group 7."""
    import pandas as pd

    names = _column_of(frame, column, file)
    if names.isna().any():
        raise DataError(f"{_place(names.isna(), column, file)} no value: must name the {what} of the row")
    firsts, same = dict[str, str](), dict[str, str]()
    for name in names.unique():
        meaning = re.sub(r"^(-?\d+)\.0+$", r"\1", name)  # 1.10 is another name than 1.1
        other = firsts.setdefault(meaning.casefold() if what == "client" else meaning, name)
        if other != name and what == "client":
            raise DataError(f"{file}, column {column!r} has {other!r} and {name!r}: must name each client in one way")
        if other != name:
            same[name] = other
    names = names.replace(same) if same else names
    coded = pd.Categorical(names)
    return torch.from_numpy(coded.codes.astype("int64")), coded.categories.tolist()


def _name_clients(where: Path, names: Sequence[str]) -> None:
    """Log which client has which name: the order is that of texts, in which 10 stands before 2."""
    shown = [
        f"{client_name({'partition-id': number})} is {name[:40]}" for number, name in enumerate(names[:MOST_NAMED])
    ]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    log_once(INFO, f"{where}: {', '.join(shown)}{more}, by the order of the texts")


def _training_files(folder: Path, form: str, client: str) -> list[Path]:
    here, clients = _named(folder, "train", form), folder / "train"
    many = scan(clients, lambda path: has_suffix(path, SUFFIXES[form])) if clients.is_dir() else Scan(clients, ())
    if many.taken and (here.taken or client):
        other = "'data.client' names a column" if client else f"there is {here.taken[0]}"
        raise DataError(f"{clients} holds a file per client, and {other}: must be one of the two")
    if not many.taken and not here.taken:
        left = f"; left out are {out}" if (out := many.left_out or here.left_out) else ""
        raise DataError(
            f"{folder} holds no training rows: must have train.{form}, or train/<client>.{form} (data.root){left}"
        )
    names: dict[str, Path] = {}
    for path in many.taken:
        if (first := names.setdefault(without_suffix(path, SUFFIXES[form]).casefold(), path)) is not path:
            raise DataError(f"{clients} holds {first.name} and {path.name}: must have one file per client")
    (many if many.taken else here).report("tables of training rows")
    return [*(many.taken or here.taken)]


def holds_test_rows(folder: Path, form: str) -> bool:
    """Return whether a folder has the table of the test rows, under any of its suffixes."""
    return bool(_named(folder, "test", form).taken)


def _named(folder: Path, name: str, form: str) -> Scan:
    """Return the table of this name in a folder, whatever its suffix; left out are other files than the set's own."""
    if not folder.is_dir():
        return Scan(folder, ())
    found = scan(folder, lambda path: without_suffix(path, SUFFIXES[form]).lower() == name != path.name.lower())
    if len(found.taken) > 1:
        raise DataError(f"{folder} holds {' and '.join(path.name for path in found.taken)}: must have one of them")
    own = (SCHEMA_FILE, "train", "test")
    others = tuple(path for path in found.others if path.name not in own and not path.name.lower().startswith("test."))
    return replace(found, others=others)


def _read(file: Path, wanted: Collection[str]) -> pd.DataFrame:
    """Return a file's cells as texts, missing ones as NaN."""
    import pandas as pd

    parquet = has_suffix(file, SUFFIXES[PARQUET])
    if other := other_kind(file):
        raise DataError(f"{file} is no table: {other}")
    try:
        table = read_csv(_as_csv(file) if parquet else unpacked(file), wanted, strict=not parquet)
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:  # those of all readers
        what = "Parquet" if parquet else "CSV"
        raise DataError(f"{file} is not a {what} file: {' '.join(str(error).split())[:300]}") from error
    if not table.rows:
        raise DataError(f"{file} has no rows: must have at least one below its header")
    named = [name for name in table.names if name]
    if twice := next((name for name in named if named.count(name) > 1), None):
        raise DataError(f"{file} names column {twice!r} twice: must name each column once")
    ours = {name.casefold(): name for name in wanted if name in named}
    if odd := next((name for name in named if ours.get(name.casefold(), name) != name and name not in wanted), None):
        raise DataError(
            f"{file} has columns {ours[odd.casefold()]!r} and {odd!r}, whose names differ in case alone: must have "
            f"one, or {SCHEMA_FILE} must name both"
        )
    if table.remarks and not parquet:
        log_once(INFO, f"{file}: {', '.join(table.remarks)}")
    frame = pd.DataFrame(table.rows, columns=list(table.names), dtype=object)
    frame = frame.mask(frame.isin(MISSING))
    frame.attrs["separator"] = table.separator
    return frame


def _as_csv(file: Path) -> bytes:
    """Return a Parquet file as the text of a CSV file, so that one table means the same in both forms."""
    import pandas as pd

    try:
        frame = pd.read_parquet(file, engine="pyarrow", dtype_backend="numpy_nullable")  # a 3 beside a gap stays 3
    except ImportError as error:
        raise OptionError(
            f"setting 'data.name' is {PARQUET!r}, but pyarrow is not installed: pip install 'oneshot-fl[parquet]'"
        ) from error
    return frame.to_csv(index=any(frame.index.names)).encode()


def _column_of(frame: pd.DataFrame, name: str, file: Path) -> pd.Series[str]:
    name = composed(name)  # as the text of a file is
    if name not in frame.columns:
        raise DataError(f"{file} has no column {name!r}: has {', '.join(map(str, frame.columns))[:200]}")
    return frame[name]


def _place(wrong: pd.Series[bool], column: str, file: Path) -> str:
    """Return the begin of an error line: the file, its column, and the first wrong row; a blank line is none."""
    first, others = int(wrong.to_numpy().argmax()), int(wrong.sum()) - 1
    more = f" (and {others} more)" if others else ""
    return f"{file}, column {column!r}, row {first + 1}{more}:"
