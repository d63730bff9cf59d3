"""Tables of the pages in docs/results and docs/lab: ``python tests/bench/feature_tables.py``.

It prints them. With ``--write`` it renews them in the pages, where each stands below a line ``<!-- results: NAME -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import run_tables
from same_uploads import GROUPS, accuracies, spread

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
# Rows of heads on a pretrained backbone beside the other methods.
HEADS = {
    "ridge": "ridge, 1,280 features",
    "lda": "LDA, 1,280 features",
    "label_counts": "trained heads by label counts, 512 features",
    "averaged": "trained heads averaged, 512 features",
}


def stored(name: str) -> dict[str, Any]:
    """Return a file of docs/results/."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are right-aligned."""
    lines = ["|" + "---:|" * len(titles), *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n".join([f"| {' | '.join(titles)} |", *lines])


def mean(values: Sequence[float]) -> str:
    """Return the mean, with the sample deviation of several values."""
    found = pd.Series(values, dtype=float)
    average = round(found.mean(), 9)  # a tie at the last digit is one, whatever the order of the sum
    return f"{average:.1f} ± {found.std():.1f}" if len(found) > 1 else f"{average:.1f}"


def methods(found: dict[str, Any], *, data: str, heads: Sequence[str]) -> str:
    """Return a row per method, ten clients at alpha 0.1, and a group for each assumption."""
    lines = ["| | accuracy, % |", "|---|---:|"]
    for group, members in GROUPS.items():
        cells = {name: spread(accuracies(found["rows"], data, place)) for name, place in members.items()}
        if any(cells.values()):
            lines += [f"| *{group}* | |", *(f"| {name} | {cell} |" for name, cell in cells.items() if cell)]
    lines.append("| *clients share a pretrained backbone: one head* | |")
    for name in heads:
        own = stored(name)
        rows = [row for row in own.get("exact", own.get("rows")) if (row["clients"], row["alpha"]) == (10, 0.1)]
        kinds = ("ridge", "lda") if "exact" in own else ("label_counts", "averaged")
        lines += [f"| {HEADS[kind]} | {mean([row[kind] for row in rows])} |" for kind in kinds]
    return "\n".join(lines)


NEWS = "MiniLM on AG-News"


def last_layers(found: dict[str, Any]) -> str:
    """Return a row per way to the last layer, and a column per start and alpha: mean over the seeds."""
    exchanges = {"method=fedavg": 1, "finish=counts": 1, "method=ties": 1, "start=ridge finish=ridge": 3}
    cells: dict[str, dict[tuple[str, float], list[float]]] = {}
    for row in found["rows"]:
        cells.setdefault(row["way"], {}).setdefault((row["model"], row["alpha"]), []).append(row["accuracy"])
    columns = sorted(
        {column for own in cells.values() for column in own}, key=lambda one: (one[0] == NEWS, -len(one[0]), -one[1])
    )
    rows = [
        [
            way,
            str(1 if "no training" in way else exchanges.get(way, 2)),
            *(mean(own[column]) if column in own else "" for column in columns),
        ]
        for way, own in cells.items()
    ]
    starts = {"LeNet-5": "drawn start", NEWS: NEWS}
    return table(
        ["", "exchanges", *(f"{starts.get(who, 'trained on MNIST')}, {alpha:g}" for who, alpha in columns)], rows
    )


def minilm(found: dict[str, Any]) -> str:
    """Return a row per head on MiniLM's features."""
    return table(["head", "accuracy, %"], [[row["head"], f"{row['accuracy']:.1f}"] for row in found["rows"]])


# File of docs/results/, and the name of one of its tables if it has several -> how it is made, and its page.
TABLES: dict[str, tuple[Callable[[Any], str], str]] = {
    **run_tables.TABLES,
    "last_layer": (last_layers, "lab/last-layer.md"),
    "feature_minilm": (minilm, "results/ag-news.md"),
    "rivals:digits": (partial(methods, data="digits", heads=("features-digits",)), "results/digits.md"),
    "rivals:cifar10": (partial(methods, data="CIFAR-10", heads=("features", "feature_rivals")), "results/cifar10.md"),
}


def tables() -> dict[str, tuple[str, str]]:
    """Return result -> its table and the page that has it."""
    files = {name: RESULTS / f"{name.partition(':')[0]}.json" for name in TABLES}
    return {
        name: (TABLES[name][0](json.loads(file.read_text())), TABLES[name][1])
        for name, file in files.items()
        if file.exists()
    }


def written(page: str, name: str, text: str) -> str:
    """Return a page whose table of this name is this one."""
    place = re.compile(rf"(<!-- results: {re.escape(name)} -->\n)(?:\|.*\n)*")
    if not place.search(page):
        raise ValueError(f"no line '<!-- results: {name} -->'")
    return place.sub(lambda found: f"{found[1]}{text}\n", page)


def main(words: Sequence[str]) -> None:
    """Print the tables, or write them."""
    for name, (text, page) in tables().items():
        if "--write" in words:
            path = DOCS / page
            path.write_text(written(path.read_text(), name, text))
        else:
            sys.stdout.write(f"{page}\n\n{text}\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
