"""Tables by an agreed schema: encoding, clients, and every mistake in one line."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest
import torch

from fl_app.config import AppConfig
from fl_app.data import open_data, open_facts
from fl_app.data.config import DataConfig
from fl_app.division import own_positions
from strategies.core.errors import DataError, OptionError

SCHEMA = """
classes = ["healthy", "ill"]

[columns.age]
mean = 50
deviation = 10.0
missing = 60

[columns."chest pain"]
levels = ["typical", "none", 3]
missing = "none"

[columns.sugar]
"""
HEAD = "centre,age,chest pain,sugar,remark,outcome"
TRAIN = ["south,40,typical,1.5,x,ill", "north, ?,none,0,,healthy", "south,70,3,-2,,healthy", "north,50,,1e1,x y,ill"]
FEATURES = [[-1, 1, 0, 0, 1.5], [1, 0, 1, 0, 0], [2, 0, 0, 1, -2], [0, 0, 1, 0, 10]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "train.csv").write_text("\n".join([HEAD, *TRAIN]))
    (tmp_path / "test.csv").write_text("\n".join([HEAD, *TRAIN[:3]]))
    return tmp_path


def config(folder: Path, name: str = "csv", **more: object) -> DataConfig:
    return DataConfig(name=name, root=str(folder), label="outcome", **more)  # type: ignore[arg-type]


def test_rows_become_features_by_the_schema_alone(folder: Path) -> None:
    split = open_data(config(folder), "train")

    assert (split.num_classes, split.classes, split.input_shape) == (2, ("healthy", "ill"), (5, 1, 1))
    assert split.labels.tolist() == [1, 0, 0, 1]
    assert split.take().images.dtype == torch.float32
    assert split.take().images[:, :, 0, 0].tolist() == FEATURES
    assert open_data(config(folder), "test").take().images[:, :, 0, 0].tolist() == FEATURES[:3]


def test_a_schema_without_classes_reads_numbers_for_a_training_of_ones_own(folder: Path) -> None:
    (folder / "schema.toml").write_text(SCHEMA.partition("\n\n")[2])
    rows = [row.rpartition(",")[0] for row in TRAIN]
    for half, count in (("train", 4), ("test", 3)):
        lines = [f"{row},{number}" for row, number in zip(rows[:count], ["-1.5", "2", "1e3", "0.0"], strict=False)]
        (folder / f"{half}.csv").write_text("\n".join([HEAD, *lines]))

    train, test = (open_data(config(folder), half, targets=True) for half in ("train", "test"))
    assert (train.targets.dtype, train.targets.tolist()) == (torch.float32, [[-1.5], [2.0], [1000.0], [0.0]])
    examples, targets = test.pairs(torch.tensor([2, 0])).tensors
    assert (examples.tolist(), targets.tolist()) == ([FEATURES[2], FEATURES[0]], [[1000.0], [-1.5]])
    assert (train.labels.tolist(), train.num_classes) == ([0, 0, 0, 0], 1)
    bare = open_facts(config(folder), absent=True, targets=True)
    assert bare.agreement == train.agreement
    classes = (folder / "train.csv").read_text().replace("1e3", "many"), "column 'outcome', row 3: 'many': must be a nu"
    empty = (folder / "train.csv").read_text().replace("1e3", "NA"), "column 'outcome', row 3: no value: must be a nu"
    for text, line in (classes, empty):
        (folder / "train.csv").write_text(text)
        with pytest.raises(DataError, match=line):
            open_data(config(folder), "train", targets=True)


def test_a_training_of_ones_own_gets_the_classes_of_a_schema_that_names_them(folder: Path) -> None:
    assert open_data(config(folder), "train", targets=True).pairs(torch.arange(4)).tensors[1].tolist() == [1, 0, 0, 1]


def test_a_column_names_the_clients(folder: Path, said: list[str]) -> None:
    data = config(folder, client="centre", partition="domains")
    split = open_data(data, "train")

    parts = [own_positions(split, AppConfig(data=data), partition_id=k, num_partitions=2).tolist() for k in (0, 1)]
    assert parts == [[1, 3], [0, 2]]  # north, south
    assert f"{folder}/train.csv: client-000 is north, client-001 is south, by the order of the texts" in said
    for changed, line in (
        (config(folder, client="centre"), "'data.partition' is 'dirichlet-classes': must be 'domains'"),
        (data, "3 clients where 'data.partition' is 'domains': must be 2"),
    ):
        with pytest.raises(OptionError, match=line):
            own_positions(split, AppConfig(data=changed), partition_id=0, num_partitions=3)


TEXT = "\n".join([HEAD, *TRAIN])
WITH_COMMAS = TEXT.replace(",", ";").replace("1.5", "1,5")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (TEXT.replace("40,typical", "forty,typical"), "column 'age', row 1: 'forty': must be a number"),
        (TEXT.replace("70,3", "inf,3"), "column 'age', row 3: 'inf': must be a number"),
        (TEXT.replace("h,40", "h,1e300"), "column 'age', row 1: '1e300': must be a number that float32 can hold"),
        (TEXT.replace("1.5", ""), "'sugar', row 1: no value: must be filled in, or .* must say what stands for 'miss"),
        (TEXT.replace("typical", "atypical"), "'chest pain', row 1: 'atypical': must be one of typical, none, 3"),
        (TEXT.replace("x,ill", "x,Ill"), "column 'outcome', row 1: 'Ill': must be one of healthy, ill"),
        (TEXT.replace("x y,ill", "x y,\n"), "column 'outcome', row 4: no value: must be one of healthy, ill"),
        (TEXT.replace("x y,ill", "x y,"), "row 4 ends in an empty cell without a line break"),
        (TEXT.replace("x y,ill", "x y"), r"row 4 \(line 5\) has 5 cells, .*cut off: must have 6"),
        (TEXT.replace("south,40", "?,40"), "column 'centre', row 1: no value: must name the client of the row"),
        (TEXT.replace("sugar", "glucose"), "has no column 'sugar': has centre, age, chest pain, glucose"),
        (TEXT.replace("outcome", "result"), "has no column 'outcome'"),
        (TEXT.replace("centre", "place"), "has no column 'centre'"),
        (TEXT.replace("north,50", 'north,"50'), "is not a CSV file: "),
        (WITH_COMMAS.replace("1e1", "10.0"), "column 'sugar': '10.0' and '1,5': must have points or decimal commas, n"),
        (WITH_COMMAS.replace("40;", "1.040;"), "comma in column 'sugar' and with a point in column 'age': must have p"),
        ("centre,age,Age,chest pain,sugar,outcome\nx,40,90,typical,1,ill\n", "'age' and 'Age', whose names differ"),
        (f"{HEAD},Outcome\n{TRAIN[0]},healthy\n", "'outcome' and 'Outcome', whose names differ in case alone"),
        (f"{TEXT}\nSouth,50,,1,,ill\n", "has 'south' and 'South': must name each client in one"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        ("<!DOCTYPE html><html>sign in</html>", "web page"),
    ],
)
def test_a_wrong_file_is_named_with_column_and_line(folder: Path, table: str, reason: str) -> None:
    (folder / "train.csv").write_text(table)

    with pytest.raises(DataError, match=reason) as error:
        open_data(config(folder, client="centre"), "train")

    assert str(folder / "train.csv") in str(error.value)


TWO = 'classes = ["a", "b"]\n'
X = f"{TWO}[columns.x]\n"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("", r"columns is NoneType: must be a table \[columns.NAME\] per column"),
        (
            "[columns.x]",
            "schema.toml has no classes: if column 'outcome' holds numbers, 'model.train' must name a function",
        ),
        ("classes = []\n[columns.x]", "classes is .*: must be a list of at least two different words"),
        ('classes = ["a", "a"]\n[columns.x]', "classes is .*: must be a list of at least two different words"),
        ('classes = ["EU", "NA"]\n[columns.x]', "classes has 'NA', which is a missing value in the files: must be"),
        ("classes = [", "is not TOML"),
        (TWO, r"columns is NoneType: must be a table \[columns.NAME\] per column"),
        (f'{TWO}label = "x"\n[columns.x]', "has 'label': must have classes and columns alone"),
        (f"{TWO}[columns]\nx = 3", r"column 'x' is int: must be a table, such as \[columns.x\]"),
        (f"{TWO}[columns.outcome]", "'data.label' is 'outcome': must be a column that schema.toml does"),
        (f"{X}min = 3", "has 'min': must be among mean, deviation, missing"),
        (f"{X}deviation = 0", "deviation is 0: must be greater than 0"),
        (f"{X}mean = nan", "mean is nan: must be a number"),
        (f'{X}levels = ["u", "v"]\nmean = 3', "has 'mean': must be among levels, missing"),
        (f'{X}levels = ["u"]', "column 'x': levels is .*: must be a list of at least two"),
        (f'{X}levels = ["u", "v"]\nmissing = "w"', "missing is 'w': must be one of its"),
        (
            f'{X}levels = ["EU", "NA"]\nmissing = "EU"',
            "column 'x': levels has 'NA', which is a missing value in the files",
        ),
    ],
)
def test_a_wrong_schema_is_refused_in_one_line(folder: Path, schema: str, reason: str) -> None:
    (folder / "schema.toml").write_text(schema)
    with pytest.raises(OptionError, match=reason):
        open_data(config(folder), "train")


def as_it_was_saved(folder: Path, split: str) -> pd.DataFrame:
    """A half as a program keeps it: numbers beside gaps, a category, and an index with a name."""
    frame = pd.read_csv(folder / f"{split}.csv", na_values="?", skipinitialspace=True).convert_dtypes()
    return frame.astype({"chest pain": "category"}).set_index("centre")


def test_parquet_and_csv_files_of_one_table_give_the_same_examples(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    data = {"client": "centre", "partition": "domains"}
    halves = [open_data(config(folder, **data), half) for half in ("train", "test")]
    for half in ("train", "test"):
        as_it_was_saved(folder, half).to_parquet(folder / f"{half}.parquet")
        (folder / f"{half}.csv").unlink()

    for csv, half in zip(halves, ("train", "test"), strict=True):
        split = open_data(config(folder, "parquet", **data), half)
        assert torch.equal(split.take().images, csv.take().images)
        assert torch.equal(split.labels, csv.labels)
        assert torch.equal(split.domains, csv.domains)  # type: ignore[arg-type]
    (folder / "test.parquet").write_bytes(b"PAR1 is only the begin")
    with pytest.raises(DataError, match=r"test.parquet is not a Parquet file: "):
        open_data(config(folder, "parquet"), "test")


@pytest.mark.parametrize("name", ["train.CSV", "TRAIN.csv", "train.csv.gz", "train.tsv", "train.csv.zip"])
def test_a_table_may_have_any_case_be_packed_or_have_tabs(folder: Path, name: str) -> None:
    (folder / "train.csv").unlink()
    pd.read_csv(io.StringIO(TEXT), dtype=str, keep_default_na=False, skipinitialspace=True).to_csv(
        folder / name, index=False, sep="\t" if name.endswith("tsv") else ","
    )
    assert open_data(config(folder), "train").take().images[:, :, 0, 0].tolist() == FEATURES


def test_clients_tables_that_are_not_read_are_said(folder: Path, said: list[str]) -> None:
    (folder / "train").mkdir()
    (folder / "train.csv").rename(folder / "train" / "a.csv")
    (folder / "train" / "b.CSV").write_text("\n".join([HEAD, *TRAIN[:2]]).replace(",", ";"))
    (folder / "train" / "c.xlsx").touch()
    split = open_data(config(folder, partition="domains"), "train")
    assert split.domains.tolist() == [0, 0, 0, 0, 1, 1]
    assert said == [
        f"{folder}/train: 2 tables of training rows; left out are 1 file (1 .xlsx): c.xlsx",
        f"{folder}/train/b.CSV: cells are divided by semicolons",
        f"{folder}/train: client-000 is a, client-001 is b, by the order of the texts",
    ]


def test_decimal_commas_are_read_where_semicolons_divide_cells(folder: Path) -> None:
    (folder / "train.csv").write_text(WITH_COMMAS.replace("1e1", "10,0"))
    assert open_data(config(folder), "train").take().images[:, :, 0, 0].tolist() == FEATURES


def test_two_tables_of_one_name_are_refused(folder: Path) -> None:
    (folder / "train.tsv").touch()
    with pytest.raises(DataError, match=r"holds train.csv and train.tsv: must have one of them"):
        open_data(config(folder), "train")


def test_one_client_has_one_file(folder: Path) -> None:
    (folder / "train.csv").rename(folder / "one.csv")
    (folder / "train").mkdir()
    for name in ("a.csv", "a.TSV"):
        (folder / "train" / name).write_text((folder / "one.csv").read_text())
    with pytest.raises(DataError, match="holds a.TSV and a.csv: must have one file per client"):
        open_data(config(folder), "train")


def test_a_server_has_test_rows_under_any_suffix_unless_its_settings_say_that_it_has_none(folder: Path) -> None:
    (folder / "test.csv").rename(folder / "test.tsv")

    assert open_facts(config(folder)) is None
    bare = open_facts(config(folder), absent=True)
    assert (len(bare.labels), bare.agreement) == (0, open_data(config(folder), "train").agreement)


def test_a_column_names_the_patients(folder: Path) -> None:
    split = open_data(config(folder, group="centre"), "train")

    assert split.groups.tolist() == [1, 0, 1, 0]
    tested = open_data(config(folder, group="centre"), "test").groups
    assert tested.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"row 2 \(and 1 more\): no value: must name the group"):
        open_data(config(folder, group="remark"), "train")


def test_a_patient_and_a_client_are_one_whether_their_number_has_a_point(folder: Path) -> None:
    """As of two exports in one file, of which one had a gap in the column."""
    rows = [f"{name},{row.partition(',')[2]}" for name, row in zip(["7", "10.0", "7.0", "10"], TRAIN, strict=True)]
    (folder / "train.csv").write_text("\n".join([HEAD, *rows]))
    assert open_data(config(folder, group="centre"), "train").groups.tolist() == [1, 0, 1, 0]
    versions = [f"{name},{row.partition(',')[2]}" for name, row in zip(["1.1", "1.10", "1.1", "2"], TRAIN, strict=True)]
    (folder / "train.csv").write_text("\n".join([HEAD, *versions]))
    assert open_data(config(folder, group="centre"), "train").groups.tolist() == [0, 1, 0, 2]
    (folder / "train.csv").write_text("\n".join([HEAD, *rows]))
    with pytest.raises(DataError, match=r"column 'centre' has '7' and '7.0': must name each client in one way"):
        open_data(config(folder, client="centre", partition="domains"), "train")


def test_spaces_around_cells_and_whole_numbers_with_a_point_mean_nothing(folder: Path) -> None:
    text = (folder / "schema.toml").read_text()
    (folder / "schema.toml").write_text(text.replace('["healthy", "ill"]', "[0, 1]"))
    rows = ["south ,40,typical ,1.5,x, 1.0 ", "north,?,none,0,,0", '"south",70,3,-2,,"0.0"', "north ,50,,1e1,,1 "]
    (folder / "train.csv").write_text("\n".join([HEAD, *rows, ""]))
    split = open_data(data := config(folder, client="centre", partition="domains"), "train")

    assert split.labels.tolist() == [1, 0, 0, 1]
    assert split.take().images[:, :, 0, 0].tolist() == FEATURES
    parts = [own_positions(split, AppConfig(data=data), partition_id=k, num_partitions=2).tolist() for k in (0, 1)]
    assert parts == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("listed", "cells", "labels"),
    [
        ("[false, true]", ["TRUE", "False", "false", "true"], [1, 0, 0, 1]),
        ('["false", "true"]', ["True", "FALSE", "False", "TRUE"], [1, 0, 0, 1]),
        ("[0.5, 1.0]", ["1", "0.50", "0.5", "1.00"], [1, 0, 0, 1]),
        ('["benign", 1]', ["1.0", "benign", "benign", "1"], [1, 0, 0, 1]),  # as pandas writes a column with a gap
        ('["1", "1.0"]', ["1.0", "1", "1", "1.0"], [1, 0, 0, 1]),  # two codes
        ("[2024-01-31, 2024-02-01]", ["2024-02-01", "2024-01-31", "2024-01-31", "2024-02-01"], [1, 0, 0, 1]),
        ('["01", "10"]', ["10.0", "01", "1", "10"], "row 3: '1': must be one of 01, 10"),
        ('["1", "1.0"]', ["1.00", "1", "1", "1.0"], "row 1: '1.00': must be one of 1, 1.0"),
        ("[false, true]", ["yes", "False", "0", "true"], r"row 1 \(and 1 more\): 'yes': must be one of False, True"),
        ("[false, true]", ["", "False", "NA", "true"], r"row 1 \(and 1 more\): no value: must be one of False, True"),
    ],
)
def test_a_class_has_one_meaning_however_programs_write_it(
    folder: Path, listed: str, cells: list[str], labels: list[int] | str
) -> None:
    text = (folder / "schema.toml").read_text()
    (folder / "schema.toml").write_text(text.replace('["healthy", "ill"]', listed))
    rows = [row.rpartition(",")[0] + "," + cell for row, cell in zip(TRAIN, cells, strict=True)]
    (folder / "train.csv").write_text("\n".join([HEAD, *rows]))
    if isinstance(labels, list):
        assert open_data(config(folder), "train").labels.tolist() == labels
    else:
        with pytest.raises(DataError, match=labels):
            open_data(config(folder), "train")
