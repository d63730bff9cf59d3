"""CSV files as people's programs write them, read strictly: a row that does not fit is an error, never repaired.

Recognised are the character between cells (comma, semicolon, tab, bar, or what a line ``sep=;`` says), UTF-8 and
UTF-16, and files that are packed. A number may have a decimal comma where cells are not divided by commas.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from .files import composed

PACKED = (".gz", ".bz2", ".xz", ".zip")
# The first bytes of a packed file, which tell more than its suffix -> the function that unpacks its bytes.
_UNPACK: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
}
_ZIP, _WORKBOOK = b"PK\x03\x04", "[Content_Types].xml"
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_NUMBER = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_POINTED_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")


class CsvCells(NamedTuple):
    """The cells of a CSV file.

    Attributes:
        names: Of the columns; empty for a column without one.
        rows: The cells of each row, without spaces around them; as many as names.
        separator: The character between cells.
        remarks: What was recognised, for a line of the log.
    """

    names: tuple[str, ...]
    rows: list[list[str]]
    separator: str
    remarks: tuple[str, ...]


def unpacked(file: Path) -> bytes:
    """Return the bytes of a file, or of the one in it if it is packed, whatever its suffix says.

    Raises:
        OSError: It cannot be read.
        EOFError: It is cut off.
        ValueError: It is damaged, or an archive of several files.
    """
    data = file.read_bytes()
    if data.startswith(_ZIP):
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names = [name for name in archive.namelist() if not name.startswith("__MACOSX") and name[-1] != "/"]
                if _WORKBOOK in names:
                    raise ValueError("it is an Excel workbook: must be saved as CSV")
                if len(names) != 1:
                    raise ValueError(f"it is an archive of {len(names)} files: must hold one")
                return archive.read(names[0])
        except zipfile.BadZipFile as error:
            raise ValueError(f"it is a damaged archive: {error}") from error
    try:
        return next((unpack(data) for begin, unpack in _UNPACK.items() if data.startswith(begin)), data)
    except lzma.LZMAError as error:
        raise ValueError(f"it is damaged: {error}") from error


def read_csv(data: bytes, wanted: Collection[str], *, strict: bool = True) -> CsvCells:
    """Read a CSV file whose first line names its columns.

    Args:
        wanted: Columns that it should have, by which the character between cells is recognised.
        strict: Whether a quoted cell must not look as if it had swallowed rows, nor the file as if it were cut off.

    Raises:
        ValueError: It is no text, or a row does not fit; names the row, from 1 without the names, and its line.
    """
    text, remarks = _text(data)
    said = re.match(r"(?i)\s*\"?sep=(.)\"?\r?\n", text)
    separator = said[1] if said else _separator(text, wanted)
    text = text[said.end() :] if said else text
    if separator != ",":
        remarks = (*remarks, f"cells are divided by {_SEPARATORS.get(separator, repr(separator))}")
    lines, skipped = list(io.StringIO(text, newline="")), 1 if said else 0
    records = _records(lines, separator, skipped)
    names = tuple(name.strip() for name in next(records, (0, 0, [""]))[2])
    rows, torn = list[list[str]](), 0 if text.endswith(("\n", "\r")) else len(lines)
    for first, last, cells in records:
        where = f"row {len(rows) + 1} (line {first + skipped})"
        if len(cells) != len(names):
            cut = ", and the file ends there without a line break, as if it were cut off" if last == torn else ""
            raise ValueError(
                f"{where} has {len(cells)} cells{cut}: must have {len(names)}, one per column named in the head"
            )
        # A cell may have line breaks. Where every line of it is a row by itself, two stray quotes have joined rows.
        if strict and last > first and _are_rows(lines[first - 1 : last], separator, len(names)):
            raise ValueError(
                f"{where} has a quote that is closed in line {last + skipped}, and each line up to there is a row "
                "by itself: must be closed in its own line"
            )
        rows.append([cell.strip() for cell in cells])
    if strict and rows and len(names) > 1 and not rows[-1][-1] and torn:
        raise ValueError(
            f"row {len(rows)} ends in an empty cell without a line break, as if the file were cut off: must end in a "
            "line break if it is whole"
        )
    if rows and torn and (end := rows[-1][-1].strip())[-1:].isdecimal():  # a text that is torn is no class or level
        remarks = (*remarks, f"the last line has no line break: {end[:80]!r} lacks digits if the file was cut off")
    return CsvCells(names, rows, separator, remarks)


def decimal_points(cells: list[str], separator: str) -> list[str]:
    """Return the cells of a column of numbers with points where they have decimal commas.

    Raises:
        ValueError: They may have commas or points between thousands, or have both.
    """
    commas = [cell for cell in cells if "," in cell]
    points = [cell.strip() for cell in cells if "." in cell]
    # Programs that divide cells by semicolons write decimal commas, and may put points between thousands.
    if separator == ";" and not commas and points and all(map(_POINTED_THOUSANDS.fullmatch, points)):
        raise ValueError(
            f"{points[0][:80]!r}: may be thousands or a decimal point, as cells are divided by semicolons: must be "
            "written without a mark between thousands, or in a file whose cells are divided by commas"
        )
    if separator == "," or not commas:
        return cells
    if odd := next((cell for cell in commas if not _NUMBER.fullmatch(cell.strip())), None):
        raise ValueError(f"{odd[:80]!r}: must be a number, such as 1234.5 or 1234,5")
    if point := next((cell for cell in cells if "." in cell), None):
        raise ValueError(f"{point[:80]!r} and {commas[0][:80]!r}: must have points or decimal commas, not both")
    if separator != ";" and all(_THOUSANDS.fullmatch(cell.strip()) for cell in commas):
        raise ValueError(
            f"{commas[0][:80]!r}: may be thousands or a decimal comma: must be written with a point, or none"
        )
    return [cell.replace(",", ".") for cell in cells]


def _text(data: bytes) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file, and what was recognised of its encoding."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if data.startswith(mark):
            found, data = encoding, data[len(mark) :]
            break
    else:
        head = data[:4096]
        odd, even = head[1::2].count(0), head[::2].count(0)
        found = "utf-8" if odd + even < len(head) / 8 else "utf-16-le" if odd > even else "utf-16-be"
    try:
        text = data.decode(found)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"line {line} is not {found.upper()} (byte 0x{data[error.start]:02x}): must be saved as UTF-8"
        ) from error
    if "\0" in text:
        raise ValueError("it has NUL bytes: must be a text file")
    return composed(text), () if found == "utf-8" else (f"encoding {found.upper()}",)


def _are_rows(lines: list[str], separator: str, columns: int) -> bool:
    """Say whether each of some lines is a row, once a quote is taken from those that have an odd number of them."""
    for number, line in enumerate(lines):
        if line.count('"') % 2:  # the first line opens the joined cell with its last quote, the last closes it
            place = line.rindex('"') if number == 0 else line.index('"')
            line = line[:place] + line[place + 1 :]
        if len(next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])) != columns:
            return False
    return True


def _separator(text: str, wanted: Collection[str]) -> str:
    """Return the character that divides the first line into most of the wanted names; a comma where none does."""
    head = next(filter(None, re.split(r"[\r\n]", text)), "")

    def found(separator: str) -> tuple[int, int]:
        names = [name.strip() for name in next(csv.reader([head], delimiter=separator, skipinitialspace=True), [])]
        return len(set(names) & set(wanted)), len(names)

    return max(_SEPARATORS, key=found)


def _records(lines: list[str], separator: str, skipped: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the first and the last line of each record, from 1, and its cells; blank lines are none."""
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    first = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"line {first + skipped}: {_fault(str(error), separator)}") from error
        if cells and not (len(cells) == 1 and not cells[0].strip() and separator not in lines[first - 1]):
            yield first, reader.line_num, cells
        first = reader.line_num + 1


def _fault(error: str, separator: str) -> str:
    if "expected after" in error:
        return f"text after a closing quote: must be followed by {separator!r} or the end of the line"
    if "unexpected end" in error:
        return "a quote that is never closed"
    return error
