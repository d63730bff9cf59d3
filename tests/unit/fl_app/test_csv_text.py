"""CSV files as people's programs write them: what is recognised, and what is refused rather than repaired."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest

from fl_app.data.csv_text import decimal_points, read_csv, unpacked

WANTED = ("age", "sugar", "outcome")
TEXT = 'age,sugar,remark,outcome\n40,1.5,"so, so",ill\n50,2,,healthy\n'
ROWS = [["40", "1.5", "so, so", "ill"], ["50", "2", "", "healthy"]]


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        TEXT.rstrip("\n").encode(),
        TEXT.replace("\n", "\r\n").encode(),
        TEXT.replace("\n", "\r").encode(),
        TEXT.replace("\n", "\n\n").encode(),
        TEXT.encode("utf-8-sig"),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        ("sep=,\n" + TEXT).encode(),
        ("sep=;\r\n" + TEXT.replace(",", ";").replace("so; so", "so, so")).encode(),
        TEXT.replace(",", ";").replace("so; so", "so, so").encode(),
        TEXT.replace(",", "\t").replace("so\t so", "so, so").encode(),
        TEXT.replace(",", " | ").replace("so |  so", "so, so").replace(" |", "|").encode(),
    ],
)
def test_the_form_of_a_file_is_recognised(data: bytes) -> None:
    table = read_csv(data, WANTED)
    assert table.names == ("age", "sugar", "remark", "outcome")
    assert table.rows == ROWS


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "age,sugar,outcome\n40,1,ill\n50,2",
            r"row 2 \(line 3\) has 2 cells, and the file ends there without .* cut off: must have 3",
        ),
        ("age,sugar,outcome\n40,1\n50,2,ill\n", r"row 1 \(line 2\) has 2 cells"),
        ("age,sugar,outcome\n40,1,ill,9\n", r"row 1 \(line 2\) has 4 cells"),
        ("age,outcome,sugar\n40,ill,1\n50,ill,", "row 2 ends in an empty cell without a line break, as if .* cut off"),
        ('age,sugar,outcome\n40,"1"2,ill\n', "line 2: text after a closing quote"),
        ('age,sugar,outcome\n40,"1,ill\n50,2,ill\n', "line 2: a quote that is never closed"),
        (
            'age,sugar,remark,outcome\n40,1,"well,ill\n50,2,fine,ill\n60,3,good",ill\n',
            r"row 1 \(line 2\) has a quote that is closed in line 4, and each line up to there is a row",
        ),
        ("sep=;\nage;sugar;outcome\n40;1\n", r"row 1 \(line 3\) has 2 cells"),
        ("age,sugar,outcome\n40,\0,ill\n", "NUL bytes"),
    ],
)
def test_a_damaged_row_is_an_error_and_never_repaired(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_csv(text.encode(), WANTED)


@pytest.mark.parametrize(("end", "said"), [("7", True), ("7.25", True), ("7\n", False), ("ill", False)])
def test_a_last_number_that_may_be_torn_is_said(end: str, said: bool) -> None:
    table = read_csv(f"age,outcome,sugar\n40,ill,1\n50,ill,{end}".encode(), WANTED)
    assert table.rows[-1][-1] == end.strip()
    assert any(repr(end) in remark and "cut off" in remark for remark in table.remarks) == said


def test_another_encoding_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"line 3 is not UTF-8 \(byte 0xe4\): must be saved as UTF-8"):
        read_csv("age,sugar,outcome\n40,1,ill\n50,2,krank ä\n".encode("latin-1"), WANTED)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            'remark,age,outcome\n"one, two\nthree ""four""",40,ill\n5\'10",50,ill\n',
            ['one, two\nthree "four"', "40", "ill"],
        ),
        ("age,remark,outcome\n40,5'10\",ill\n", ["40", "5'10\"", "ill"]),
        ('age,note,outcome\n40,"a, b, c, d\ne, f, g, h, i",ill\n', ["40", "a, b, c, d\ne, f, g, h, i", "ill"]),
    ],
)
def test_a_cell_may_have_line_breaks_quotes_and_commas(text: str, first: list[str]) -> None:
    assert read_csv(text.encode(), WANTED).rows[0] == first


@pytest.mark.parametrize(
    ("cells", "separator", "found"),
    [
        (["1,5", "-2,25e3", "7"], ";", ["1.5", "-2.25e3", "7"]),
        (["1,234"], ";", ["1.234"]),
        (["1.5", "2"], ";", ["1.5", "2"]),
        (["1.500", "0.250"], ";", ["1.500", "0.250"]),
        (["1.500", "2.500"], ",", ["1.500", "2.500"]),
        (["1.500", "2.500"], "\t", ["1.500", "2.500"]),
        (["1,5", "2"], "\t", ["1.5", "2"]),
        (["1,5"], ",", ["1,5"]),  # which is no number, as the column says
    ],
)
def test_decimal_commas(cells: list[str], separator: str, found: list[str]) -> None:
    assert decimal_points(cells, separator) == found


@pytest.mark.parametrize(
    ("cells", "separator"),
    [
        (["1.234,5"], ";"),
        (["1,5", "2.5"], ";"),
        (["1,234", "12,345,678"], "\t"),
        (["1,234"], "\t"),
        (["a,b"], ";"),
        (["1.500"], ";"),
        (["900", "-12.345.678"], ";"),
    ],
)
def test_commas_that_may_mean_two_things_are_refused(cells: list[str], separator: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*must "):
        decimal_points(cells, separator)


def zipped(data: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), data)  # of one date, so that all workers name a test alike
    return file.getvalue()


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".csv", b"x"),
        (".csv.gz", gzip.compress(b"x", mtime=0)),
        (".CSV.BZ2", bz2.compress(b"x")),
        (".tsv.xz", lzma.compress(b"x")),
        (".csv.zip", zipped(b"x", "a.csv", "__MACOSX/._a.csv")),
        (".csv", gzip.compress(b"x", mtime=0)),  # the content says more than the suffix
        (".csv.gz", b"x"),
    ],
)
def test_packed_files_are_unpacked(tmp_path: Path, suffix: str, data: bytes) -> None:
    (file := tmp_path / f"a{suffix}").write_bytes(data)
    assert unpacked(file) == b"x"


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".csv.gz", gzip.compress(b"x" * 99, mtime=0)[:-9]),
        (".csv.gz", b"\x1f\x8bage,outcome"),
        (".csv.xz", lzma.compress(b"x" * 99)[:-9]),
        (".csv.zip", zipped(b"x", "a.csv", "b.csv")),
        (".csv.zip", b"PK\x03\x04 nothing"),
        (".csv", zipped(b"x", "[Content_Types].xml", "xl/workbook.xml")),
    ],
)
def test_damaged_packed_files_are_refused(tmp_path: Path, suffix: str, data: bytes) -> None:
    (file := tmp_path / f"a{suffix}").write_bytes(data)
    with pytest.raises((ValueError, EOFError, OSError)):
        unpacked(file)


def test_letters_are_composed_and_the_separator_line_may_have_any_case() -> None:
    table = read_csv("SEP=;\nage;cafe\u0301\n40;1\n".encode(), WANTED)
    assert table.names == ("age", "caf\u00e9")
