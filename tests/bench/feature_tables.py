"""The tables of docs/features.md and docs/scale.md that come from docs/results/; prints them.

python tests/bench/feature_tables.py
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RIVALS = {
    "ridge": "ridge",
    "lda": "LDA",
    "averaged": "heads averaged",
    "fedens": "mean of posteriors",
    "label_counts": "by label counts",
    "alone": "one client alone",
}


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are right-aligned."""
    lines = ["|" + "---:|" * len(titles), *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n".join([f"| {' | '.join(titles)} |", *lines])


def mean(values: Sequence[float]) -> str:
    """Return the mean, with the sample deviation of several values."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def rivals(found: dict[str, Any]) -> str:
    """Return a row per number of clients and alpha: every method, mean over the seeds."""
    cells: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault((row["clients"], row["alpha"]), []).append(row)
    rows = [
        [f"{clients:,}", f"{alpha:g}", *(mean([row[key] for row in cell]) for key in RIVALS)]
        for (clients, alpha), cell in cells.items()
    ]
    return table(["clients", "alpha", *RIVALS.values()], rows)


def scale(found: dict[str, Any]) -> str:
    """Return a row per number of features and uploads."""
    rows = [
        [
            f"{row['features']:,}",
            f"{row['uploads']:,}",
            f"{row['kib']:,.0f}",
            f"{1000 * row['check_cpu_s']:.0f}",
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


TABLES = {
    "feature_rivals": (rivals, "features.md"),
    "feature_scale": (scale, "scale.md"),
    "feature_attacks": (attacks, "features.md"),
}


def tables() -> dict[str, tuple[str, str]]:
    """Return result -> its table and the page that has it."""
    files = {name: RESULTS / f"{name}.json" for name in TABLES}
    return {
        name: (TABLES[name][0](json.loads(file.read_text())), TABLES[name][1])
        for name, file in files.items()
        if file.exists()
    }


if __name__ == "__main__":
    for text, page in tables().values():
        sys.stdout.write(f"{page}\n\n{text}\n\n")
