"""The figures in the pages are those that follow from the stored results."""

from __future__ import annotations

import re
import runpy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import unescape
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doc_pages import PAGES, ROOT, name_of
from doc_pages import rows as table_rows

from strategies.core.durable import read_json

RESULTS = ROOT / "docs" / "results"
RUNS = runpy.run_path(str(ROOT / "tests" / "bench" / "run_tables.py"))
# The name of a file of results, what a page shows of it, and the lines of the table.
BELOW = re.compile(r"<!-- results: ([\w-]+)(.*) -->\n((?:\|.*\n)+)")
TABLES = [(page, *found) for page in PAGES for found in BELOW.findall(page.read_text())]
# Tables have rows of other files, too: those of heads on a backbone.
ALSO = {"docs/results/digits.md": ["features-digits"], "docs/results/cifar10.md": ["features", "feature_rivals"]}
NUMBER = r"[+-]?\d+\.\d"
FIGURE = re.compile(rf"{NUMBER}(?: ± {NUMBER}|\*| \({NUMBER} to {NUMBER}\))?")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_as_they_were_written(path: Path) -> None:
    assert read_json(path)


@pytest.mark.parametrize("data", RUNS["PAGES"])
def test_the_page_has_the_table_of_the_published_schedule(data: str) -> None:
    table = RUNS["published"](read_json(RUNS["OUT"]), data=data)
    assert f"<!-- results: published:{data} -->\n{table}\n" in (RUNS["DOCS"] / RUNS["PAGES"][data]).read_text()


@pytest.mark.parametrize(("page", "name", "more", "table"), TABLES, ids=[f"{name_of(t[0])}{t[2]}" for t in TABLES])
def test_every_figure_is_one_of_the_results_their_mean_or_a_paired_difference(
    page: Path, name: str, more: str, table: str
) -> None:
    known = set[str]().union(*map(figures_of, [name, *ALSO.get(name_of(page), ())]))
    titles, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]

    wrong = [
        f"{cells[0]}: {figure}"
        for cells in lines
        for title, cell in zip(titles[1:], cells[1:], strict=True)
        for figure in FIGURE.findall("" if title in ("paper", "CPU s") else cell)
        if figure not in known
    ]
    assert wrong == []


@cache
def figures_of(name: str) -> frozenset[str]:
    """Return, as pages print them, a file's numbers, their means over the seeds, and their paired differences."""
    figures = set[str]()
    for cell in cells_of(name):
        for series in cell.values():
            figures |= {f"{unit * value:.1f}" for value in series.values() for unit in (1, 100)}
            for seeds in (series.keys(), series.keys() & {0, 1, 2}):
                for unit in (1, 100) if seeds else ():
                    figures |= printed([unit * series[seed] for seed in seeds])
        for *whose, path in [key for key in cell if key[-1].endswith(".low")]:
            ends = [cell[*whose, path.replace("low", end)].values() for end in ("value", "low", "high")]
            value, low, high = (100 * float(np.mean([*each])) for each in ends)
            figures |= {f"{value:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})" for sign in ("", "+")}
        for own, rival in permutations([key for key in cell if key[-1].startswith(".accuracy")], 2):
            # A row of other clients is compared with the rival on the same.
            paired = cell[own].keys() & cell[rival].keys()
            others = cell.get((*rival[:-2], rival[-2] + RUNS["OTHERS"], rival[-1]), {})
            for seeds in (paired, paired & {0, 1, 2}):
                each = [{cell[rival][seed], others.get(seed, cell[rival][seed])} for seed in seeds]
                for rivals in product(*each) if seeds else ():
                    figures |= printed([cell[own][seed] - value for seed, value in zip(seeds, rivals, strict=True)])
    return frozenset(figures)


def cells_of(name: str) -> list[dict[tuple[str, ...], dict[int, float]]]:
    """Return for each federation the numbers under their rows' names and their own, by the seed."""
    cells: dict[str, dict[tuple[str, ...], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    parts = {key: part for key, part in read_json(RESULTS / f"{name}.json").items() if isinstance(part, list)}
    rows = [(key, row) for key, part in parts.items() for row in part]
    # Where the tables' clients have a result, it stands in place of that on clients of another processor.
    for key, row in sorted(rows, key=lambda found: RUNS["OTHERS"] not in found[1].get("name", "")):
        place = f"{key}, {row.get('data')}, {row.get('alpha')}, {row.get('clients')}"
        who = [str(row[column]) for column in ("model", "way", "head", "name") if column in row] or [""]
        for path, value in leaves(row):
            for last in {who[-1], who[-1].removesuffix(RUNS["OTHERS"])}:
                cells[place][*who[:-1], last, path][row.get("seed", row.get("draw", 0))] = value
    return [*cells.values()]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row with the way to them; a curve has epochs and accuracies."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}")
    elif path == ".curve":
        yield from ((f"{path}.{epoch}", accuracy) for epoch, accuracy in value)
    elif isinstance(value, (int, float)):
        yield path, value


def printed(values: Sequence[float]) -> set[str]:
    """Return the mean, alone, with a star, and with the sample deviation."""
    mean = round(float(np.mean(values)), 9)  # a tie at the last digit is one, whatever the order of the sum
    behind = {"", "*", f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""}
    return {f"{mean:{sign}.1f}{more}" for sign in ("", "+") for more in behind}


def test_the_plot_shows_the_figures_of_the_page() -> None:
    plot = ROOT / "docs" / "lab" / "same-uploads.svg"
    head, *lines = next(table for page, _, _, table in TABLES if page.stem == plot.stem).splitlines()
    sets = [title.strip() for title in head.split("|")[2:-2]]

    shown = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", plot.read_text())]

    panels = np.array([text for text in shown if re.fullmatch(r"\d+\.\d\*?", text)]).reshape(len(sets), -1)
    for number, panel in enumerate(panels):
        assert {*panel} <= {line.split("|")[2 + number].partition("±")[0].strip() for line in lines}
    assert {*sets} <= {*shown}


def means_of(page: str, name: str) -> set[str]:
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
            known = means_of(f"results/{page}", method) | means_of("lab/backbone-or-training.md", method)
            assert figure in known, f"{page}: {name}"
