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

import flboost_tables
import pandas as pd
import run_tables
import tally_tables
from rivals import GROUPS, accuracies, spread

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
RIVALS = {
    "ridge": "ridge",
    "lda": "LDA",
    "fedpft": "FedPFT",
    "averaged": "heads averaged",
    "fedens": "mean of posteriors",
    "label_counts": "by label counts",
    "alone": "one client alone",
    "tally_ensemble": "Tally, ensemble",
    "tally": "Tally, student",
    "fens nn": "FENS, two layers",
    "fens per-class": "FENS, per class",
}
# Rows of heads on a pretrained backbone beside the other methods.
HEADS = {
    "ridge": "ridge, 1,280 features",
    "lda": "LDA, 1,280 features",
    "label_counts": "trained heads by label counts, 512 features",
    "averaged": "trained heads averaged, 512 features",
}
# Name of a data set in settings -> in docs/results/rivals.json, in small letters.
NAMES = {"digits": "digits", "fashion-mnist": "fashion-mnist", "mnist": "mnist", "cifar10": "cifar-10"}
# Kind of a student's images in docs/results/tally_student.json -> as tables and plots call it.
KINDS = {"noise": "noise", "spanned": "noise and spanned images in halves", "real": "training images"}


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are right-aligned."""
    lines = ["|" + "---:|" * len(titles), *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n".join([f"| {' | '.join(titles)} |", *lines])


def mean(values: Sequence[float]) -> str:
    """Return the mean, with the sample deviation of several values."""
    found = pd.Series(values, dtype=float)
    average = round(found.mean(), 9)  # a tie at the last digit is one, whatever the order of the sum
    return f"{average:.1f} ± {found.std():.1f}" if len(found) > 1 else f"{average:.1f}"


def rivals(found: dict[str, Any]) -> str:
    """Return a row per number of clients and alpha: every method, mean over the seeds."""
    cells: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault((row["clients"], row["alpha"]), []).append(row)
    measured = [key for key in RIVALS if all(key in row for row in found["rows"])]
    rows = [
        [f"{clients:,}", f"{alpha:g}", *(mean([row[key] for row in cell]) for key in measured)]
        for (clients, alpha), cell in cells.items()
    ]
    return table(["clients", "alpha", *(RIVALS[key] for key in measured)], rows)


def gaussians(found: dict[str, Any]) -> str:
    """Return a row per number of clients and covariance of FedPFT, mean over the seeds."""
    cells: dict[tuple[int, str], list[float]] = {}
    for row in found["rows"]:
        cells.setdefault((row["clients"], row["covariance"]), []).append(row["fedpft"])
    return table(["clients", "covariance", "FedPFT"], [[str(k), kind, mean(own)] for (k, kind), own in cells.items()])


def privacy(found: dict[str, Any]) -> str:
    """Return a row per number of clients and budget: ridge with all features and few, and DP-SGD where measured."""
    cells = {(row["features"], row["clients"], row["epsilon"]): row for row in found["rows"]}
    few, most = (pick(row["features"] for row in found["rows"]) for pick in (min, max))
    ways = {"averaged": "averaged", "fedens": "mean of posteriors"}
    ways = {key: title for key, title in ways.items() if all(key in cells[own] for own in cells if own[0] == few)}
    rows = [
        [f"{clients}", f"{epsilon:g}", *(mean(cells[most, clients, epsilon][key]) for key in ("ridge_all", "ridge")),
         *(mean(row[key]) for key in ("ridge", *ways))]
        for (features, clients, epsilon), row in cells.items() if features == few
    ]  # fmt: skip
    examples = "texts" if found["data"] == "ag-news" else "images"
    titles = ["clients", "epsilon", f"ridge, {most:,}, all test {examples}", f"ridge, {most:,}", f"ridge, {few}"]
    return table([*titles, *(f"DP-SGD {title}, {few}" for title in ways.values())], rows)


def exact(found: dict[str, Any]) -> str:
    """Return a row per head and number of clients, a column per alpha: mean over the seeds."""
    cells: dict[tuple[str, int], dict[float, list[float]]] = {}
    for method in ("ridge", "lda"):
        for row in found["exact"]:
            cells.setdefault((method, row["clients"]), {}).setdefault(row["alpha"], []).append(row[method])
    alphas = sorted({row["alpha"] for row in found["exact"]})
    rows = [
        [RIVALS[method], f"{clients:,}", *(mean(row[alpha]) if alpha in row else "" for alpha in alphas)]
        for (method, clients), row in cells.items()
    ]
    return table(["head", "clients", *(f"alpha {alpha:g}" for alpha in alphas)], rows)


def fit(found: dict[str, Any]) -> str:
    """Return a row per data set: heads on the backbone beside nets from scratch, ten clients at alpha 0.1."""
    others = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("features-*.json"))]
    scratch = json.loads((RESULTS / "rivals.json").read_text())["rows"]
    rows = []
    for own in [*others, found]:
        cell = [row for row in own["exact"] if (row["clients"], row["alpha"]) == (10, 0.1)]
        nets = [
            row["accuracy"] for row in scratch if (row["data"].lower(), row["name"]) == (NAMES[own["data"]], "tally")
        ]
        rivals = [mean([row[key] for row in nets]) if nets else "" for key in ("Tally ensemble", "Tally")]
        heads = [mean([row[key] for row in cell]) for key in ("ridge", "lda")]
        rows.append([NAMES[own["data"]], f"{own['train']:,}", str(own["side"]), *heads, *rivals])
    titles = ["data set", "training images", "pixels a side", "ridge", "LDA", "Tally's ensemble of nets", "its one net"]
    return table(titles, rows)


def upload(found: dict[str, Any]) -> str:
    """Return a row per number of features."""
    rows = [
        [f"{row['features']:,}", f"{row['kib']:,.1f}", f"{row['lambda']:.2g}", f"{row['ridge']:.1f}"]
        for row in found["upload"]
    ]
    return table(["features", "KiB per client", "chosen λ", "ridge, %"], rows)


def maps(found: dict[str, Any]) -> str:
    """Return a row per width of a fixed random map."""
    rows = [
        [f"{row['width']:,}", f"{row['kib']:,.0f}", f"{row['lambda']:.2g}", f"{row['ridge']:.1f}"]
        for row in found["maps"]
    ]
    return table(["width", "KiB per client", "chosen λ", "ridge, %"], rows)


def scale(found: dict[str, Any]) -> str:
    """Return a row per number of features and uploads."""
    rows = [
        [
            f"{row['features']:,}",
            f"{row['uploads']:,}",
            f"{row['kib']:,.0f}",
            f"{1000 * row['check_cpu_s']:.0f} / {1000 * row['check_many_cpu_s']:.0f}",
            f"{1000 * row['add_cpu_s']:.1f}",
            f"{row['peak_mib']:.0f}",
        ]
        for row in found["rows"]
    ]
    titles = ["features", "uploads", "KiB per upload", "CPU ms of its checks", "CPU ms to add it", "MiB, peak"]
    return table(titles, rows)


def attacks(found: dict[str, Any]) -> str:
    """Return a row per attack: accuracy without and with the defences, and how often the client was found."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault(row["attack"], []).append(row)
    rows = [
        [
            attack,
            *(mean([row[key] for row in cell]) for key in ("none", "gatekeeper", "cap", "both")),
            f"{sum('c0' in row['suspects'] for row in cell)} of {len(cell)}",
            str(sum(len(set(row["suspects"]) - {"c0"}) for row in cell)),
        ]
        for attack, cell in cells.items()
    ]
    return table(["attack", "neither", "gatekeeper", "cap", "both", "found", "honest suspects"], rows)


def students(found: dict[str, Any]) -> str:
    """Return a row per trial: the student's accuracy on the report half and its ensemble's, in each cell."""
    rows = [row for row in found["rows"] if not row.get("count")]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    shown: dict[str, dict[str, str]] = {}
    for row in rows:
        figures = f"{row['student']['report']:.1f} of {row['ensemble']['report']:.1f}"
        shown.setdefault(row["trial"], {})[row["cell"]] = figures
    return table(["", *cells], [[trial, *(own.get(cell, "") for cell in cells)] for trial, own in shown.items()])


def numbers_of_images(found: dict[str, Any]) -> str:
    """Return a row per cell and kind of images: the student's accuracy on the report half by their number."""
    rows = [row for row in found["rows"] if row.get("count")]
    counts = sorted({row["count"] for row in rows})
    shown: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        shown.setdefault((row["cell"], KINDS[row["images"]]), {})[row["count"]] = f"{row['student']['report']:.1f}"
    lines = [[*title, *(own.get(count, "") for count in counts)] for title, own in shown.items()]
    return table(["", "images", *(f"{count:,}" for count in counts)], lines)


def methods(found: dict[str, Any], *, data: str, heads: Sequence[str]) -> str:
    """Return a row per method, ten clients at alpha 0.1, and a group for each assumption.

    Args:
        found: The results of tests/bench/rivals.py.
        data: One of its data sets.
        heads: Files with results of heads on a pretrained backbone, which are the last group.
    """
    lines = ["| | accuracy, % |", "|---|---:|"]
    for group, members in GROUPS.items():
        cells = {name: spread(accuracies(found["rows"], data, place)) for name, place in members.items()}
        if any(cells.values()):
            lines += [f"| *{group}* | |", *(f"| {name} | {cell} |" for name, cell in cells.items() if cell)]
    lines.append("| *clients share a pretrained backbone: one head* | |")
    for name in heads:
        stored = json.loads((RESULTS / f"{name}.json").read_text())
        rows = [row for row in stored.get("exact", stored.get("rows")) if (row["clients"], row["alpha"]) == (10, 0.1)]
        kinds = ("ridge", "lda") if "exact" in stored else ("label_counts", "averaged")
        lines += [f"| {HEADS[kind]} | {mean([row[kind] for row in rows])} |" for kind in kinds]
    return "\n".join(lines)


# File of docs/results/, and the name of one of its tables if it has several -> how it is made, and its page.
TABLES: dict[str, tuple[Callable[[Any], str], str]] = {
    "features:exact": (exact, "lab/backbone-partitions.md"),
    "features:fit": (fit, "lab/backbone-or-training.md"),
    "features:upload": (upload, "lab/backbone-partitions.md"),
    "feature_rivals": (rivals, "lab/backbone-heads.md"),
    "feature_ensembles": (rivals, "lab/backbone-ensembles.md"),
    "feature_gaussians": (gaussians, "lab/fedpft.md"),
    "feature_privacy": (privacy, "lab/backbone-privacy.md"),
    "feature_texts:exact": (exact, "lab/backbone-texts.md"),
    "feature_texts:upload": (upload, "lab/backbone-texts.md"),
    "feature_texts:maps": (maps, "lab/backbone-texts.md"),
    "feature_texts_rivals": (rivals, "results/ag-news.md"),
    "feature_texts_privacy": (privacy, "lab/backbone-texts.md"),
    "feature_scale": (scale, "lab/many-clients.md"),
    "feature_attacks": (attacks, "lab/harmful-sums.md"),
    "tally_student": (students, "lab/student-gap-long-training.md"),
    "tally_student:images": (numbers_of_images, "lab/number-of-images.md"),
    **tally_tables.TABLES,
    **run_tables.TABLES,
    **{name: (made, "lab/flboost-input-space.md") for name, made in flboost_tables.TABLES.items()},
    "gpu": (run_tables.gpu, "lab/gpu.md"),
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
    """Return a page whose table of this name is this one.

    Raises:
        ValueError: The page has no place for it.
    """
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
