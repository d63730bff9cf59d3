"""The tables in the pages are those that follow from the stored results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT
from doc_pages import rows as table_rows

from strategies.run.files import read_json

BENCH = ROOT / "tests" / "bench"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCH))
    TABLES = runpy.run_path(str(BENCH / "feature_tables.py"))["tables"]()
    RUNS = runpy.run_path(str(BENCH / "run_tables.py"))


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_page_has_the_table_of_the_results(name: str) -> None:
    text, page = TABLES[name]
    assert text in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_are_as_they_were_written(path: Path) -> None:
    assert read_json(path)


def test_the_page_has_the_rivals_figures_and_their_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    rivals = runpy.run_path(str(BENCH / "same_uploads.py"))
    rows = read_json(ROOT / "docs" / "results" / "rivals.json")["rows"]
    page = (ROOT / "docs" / "lab" / "same-uploads.md").read_text()
    assert [line for line in rivals["table"](rows).splitlines() if line not in page] == []
    assert rivals["differences"](rows) in page


def figures_of(page: str, name: str) -> set[str]:
    """Return the means in the rows, and in the columns, of a page's tables that have this name."""
    found, head = set[str](), list[str]()
    for line in (ROOT / "docs" / page).read_text().lower().splitlines():
        cells = [cell.partition("±")[0].strip() for cell in line.split("|")[1:-1]]
        head = (head or cells) if cells else []
        found |= {cell for title, cell in zip(head, cells, strict=False) if name in cells[0] or name in title}
    return found


def test_best_of_every_data_set_is_a_figure_of_its_page() -> None:
    for data, _, *best in table_rows((ROOT / "docs/results/README.md").read_text(), "data set"):
        [page] = re.findall(r"\((.+)\)", data)
        for name, figure in (cell.lower().removesuffix(" %").split(", ") for cell in best if cell):
            method = name.partition("'")[0]
            known = figures_of(f"results/{page}", method) | figures_of("lab/backbone-or-training.md", method)
            assert figure in known, f"{page}: {name}"


def row(name: str, seed: int, **accuracy: float) -> dict[str, Any]:
    return {"data": "mnist", "alpha": 0.1, "seed": seed, "name": name, "accuracy": accuracy}


def test_what_a_method_has_over_fedens_is_paired_by_seed_and_stands_beside_the_papers() -> None:
    rows = [row("fedens", seed, FedENS=value) for seed, value in enumerate((90.0, 80.0, 70.0))]
    rows += [row("dense", seed, DENSE=value) for seed, value in enumerate((91.0, 82.0, 73.0))]
    rows += [row("tally, spans", 1, Tally=95.0)]

    table = RUNS["over_fedens"]({"rows": rows}, data="mnist").splitlines()

    # The paper's DENSE has 87.8, and its FedENS 88.2.
    assert "| DENSE | +2.0 ± 1.0 | -0.4 |" in table
    assert "| Tally, estimated counts, images in the update spans | +15.0* |  |" in table
    assert not any(line.startswith("| FedENS") for line in table)


def test_a_seed_without_a_result_on_the_tables_clients_has_that_on_other_clients_beside_their_own_fedens() -> None:
    others = RUNS["OTHERS"]
    rows = [row("fedens", seed, FedENS=90.0) for seed in range(3)]
    rows += [row("dense", 0, DENSE=91.0), row("dense", 1), row("tally, read off", 1, **{"Tally ensemble": 97.0})]
    rows += [row(f"fedens{others}", seed, FedENS=80.0) for seed in (0, 1)]
    rows += [row(f"dense{others}", 0, DENSE=10.0), row(f"dense{others}", 1, DENSE=83.0)]
    found = {"rows": [{**each, "server_cpu_s": 0.02} for each in rows]}

    assert "| DENSE | +2.0* | -0.4 |" in RUNS["over_fedens"](found, data="mnist").splitlines()
    assert "| DENSE | 87.0* | 87.8 |  |" in RUNS["published"](found, data="mnist").splitlines()
    assert "| FedENS | 90.0 ± 0.0 | 88.2 |  |" in RUNS["published"](found, data="mnist").splitlines()
    assert "| FedENS | +7.0* (1 of 1) |" in RUNS["differences"](found, data="mnist").splitlines()


def test_a_partition_has_one_curve_that_of_the_run_which_ended_on_the_tables_clients() -> None:
    stopped = [{**row("dense", seed), "curve": [[50, 1.0]]} for seed in (0, 1)]
    ended = {**row(f"dense{RUNS['OTHERS']}", 0, DENSE=2.0), "curve": [[50, 1.0], [500, 2.0]]}
    other = {**row(f"intactofl{RUNS['OTHERS']}", 0, IntactOFL=3.0), "curve": [[200, 3.0]]}
    tables = {**row("intactofl", 0, IntactOFL=4.0), "curve": [[200, 4.0]]}

    table = RUNS["curves"]({"rows": [*stopped, ended, tables, other]}, data="mnist").splitlines()

    rows = {line.split(" |")[0].strip("| "): line.split("|")[-3].strip() for line in table[2:]}
    assert rows == {
        "dense, alpha 0.1, seed 0": "2.0",
        "dense, alpha 0.1, seed 1": "1.0",
        "intactofl, alpha 0.1, seed 0": "4.0",
    }
