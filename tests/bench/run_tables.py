"""The tables of clients of 300 local epochs: ``python tests/bench/run_tables.py``, or ``make results``.

It renews them in the pages, where each stands below a line ``<!-- results: published:DATA -->``, from
docs/results/published.json, which tests/bench/published.py measures. The tables of final results were made by scripts
of the history: docs/results/scripts.json names their commits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from strategies.core.durable import read_json

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
OUT = RESULTS / "published.json"
ALPHAS, SEEDS = (0.1, 0.05, 0.3), range(3)
HEADLINE, HEADLINE_SEEDS = ("fashion-mnist", 0.1), range(10)  # the data set and the skew with more seeds
PAGES = {
    "fashion-mnist": "results/fashion-mnist.md",
    "mnist": "results/mnist.md",
    "cifar10": "lab/cifar10-published.md",
}
# Ends the name of a row whose clients have the partition of the tables' clients, and were trained by another processor.
OTHERS = ", clients of another processor"
UNCHANGED, REPORTED = "clients upload only a model", "clients also report class counts"
ASKED = "clients answer again"
Found = Mapping[str, Any]
Entry = tuple[str, str]  # a row's name in docs/results/published.json, and one of its accuracies
# Group -> row -> its entry.
GROUPS: dict[str, dict[str, Entry]] = {
    f"{UNCHANGED}: ensembles": {
        "FedENS": ("fedens", "FedENS"),
        "DW-FedENS": ("dw-fedens", "DW-FedENS"),
        "mean of probabilities": ("mean of probabilities", "FedENS"),
        "IntactOFL": ("intactofl", "IntactOFL"),
        "Co-Boosting ensemble": ("co-boosting", "Co-Boosting ensemble"),
        "**Tally ensemble, estimated counts**": ("tally, read off", "Tally ensemble"),
    },
    f"{UNCHANGED}: one model": {
        "FedAvg": ("run", "FedAvg (one shot)"),
        "DENSE": ("dense", "DENSE"),
        "Co-Boosting": ("co-boosting", "Co-Boosting"),
        "**Tally, estimated counts**": ("tally, read off", "Tally"),
    },
    f"{UNCHANGED}, and start from the server's: one model": {
        "FedAvg, linear layers merged": ("fedavg, merged", "FedAvg (one shot)"),
        "Tally, estimated counts, merged start": ("tally, merged", "Tally"),
        "Tally, estimated counts, images in the update spans": ("tally, spans", "Tally"),
    },
    REPORTED: {
        "Label-count ensemble": ("label-count-ensemble", "Label-count ensemble"),
        "Tally ensemble": ("tally", "Tally ensemble"),
        "Tally": ("tally", "Tally"),
    },
    f"{ASKED}: ensemble": {"FENS, 500 rounds with the clients": ("fens, 500 rounds", "FENS")},
    f"{REPORTED}, and answer again: ensemble": {"FENS, 20 rounds with the clients": ("fens", "FENS")},
}
# Data set -> skew -> row -> Co-Boosting's Tables 1, 2 and 9: the best epoch on all test images, mean of its seeds.
PAPER: dict[str, dict[float, dict[str, float]]] = {
    "fashion-mnist": {
        0.1: {"FedENS": 71.3, "Co-Boosting ensemble": 76.5, "FedAvg": 46.6, "DENSE": 69.4, "Co-Boosting": 74.9},
        0.05: {"FedENS": 45.5, "Co-Boosting ensemble": 52.4, "FedAvg": 20.1, "DENSE": 44.8, "Co-Boosting": 50.6},
        0.3: {"FedENS": 83.6, "Co-Boosting ensemble": 83.1, "FedAvg": 60.1, "DENSE": 81.3, "Co-Boosting": 83.1},
    },
    "mnist": {
        0.1: {"FedENS": 88.2, "Co-Boosting ensemble": 94.5, "FedAvg": 75.7, "DENSE": 87.8, "Co-Boosting": 94.4},
        0.05: {"FedENS": 81.5, "Co-Boosting ensemble": 94.6, "FedAvg": 46.4, "DENSE": 81.1, "Co-Boosting": 93.9},
        0.3: {"FedENS": 97.8, "Co-Boosting ensemble": 97.8, "FedAvg": 79.0, "DENSE": 97.0, "Co-Boosting": 97.2},
    },
    "cifar10": {
        0.1: {"FedENS": 50.0, "Co-Boosting ensemble": 59.9, "FedAvg": 27.5, "DENSE": 47.8, "Co-Boosting": 57.1},
        0.05: {"FedENS": 42.3, "Co-Boosting ensemble": 48.8, "FedAvg": 17.5, "DENSE": 38.4, "Co-Boosting": 47.2},
        0.3: {"FedENS": 69.6, "Co-Boosting ensemble": 72.7, "FedAvg": 46.4, "DENSE": 66.8, "Co-Boosting": 70.2},
    },
}


def published(found: Found, *, data: str) -> str:
    """Return the table of a data set: mean and deviation over the seeds for each measured skew, beside the paper's."""
    alphas = _measured(found, data)
    titles = [title for alpha in alphas for title in (f"alpha {alpha:g}", "paper")]
    lines = [f"|  | {' | '.join([*titles, 'CPU s'])} |", f"|---{'|---:' * (len(titles) + 1)}|"]
    for group, members in GROUPS.items():
        rows = []
        for title, entry in members.items():
            cells = [
                cell
                for alpha in alphas
                for cell in (spread(_accuracies(found, data, alpha, entry)), f"{PAPER[data][alpha].get(title, '')}")
            ]
            if any(cells):
                rows.append(f"| {title} | {' | '.join([*cells, _seconds(found, data, entry[0])])} |")
        if rows:
            lines += [f"| *{group}* |{' |' * (len(titles) + 1)}", *rows]
    return "\n".join(lines)


def _measured(found: Found, data: str) -> list[float]:
    """Return the skews of a data set that have results, 0.1 first."""
    return [
        ALPHAS[0],
        *(alpha for alpha in ALPHAS[1:] if any((row["data"], row["alpha"]) == (data, alpha) for row in found["rows"])),
    ]


def _accuracies(found: Found, data: str, alpha: float, entry: Entry) -> list[float]:
    """Return the accuracies in % of the seeds: of a seed without a result on the tables' clients, those on others."""
    name, outcome = entry
    cell = [row for row in found["rows"] if (row["data"], row["alpha"]) == (data, alpha) and outcome in row["accuracy"]]
    by_seed = {
        row["seed"]: row["accuracy"][outcome] for own in (name + OTHERS, name) for row in cell if row["name"] == own
    }
    return [accuracy for seed, accuracy in by_seed.items() if seed in SEEDS]


def spread(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation, as ``82.2 ± 2.6``; with a star for fewer than three values."""
    if not values:
        return ""
    average = round(fmean(values), 9)  # a tie at the last digit is one, whatever the order of the sum
    return f"{average:.1f} ± {stdev(values):.1f}" if len(values) == len(SEEDS) else f"{average:.1f}*"


def _seconds(found: Found, data: str, name: str) -> str:
    """Return the mean CPU seconds of a server stage over the cells; an ensemble that computes nothing has none."""
    rows = [row for row in found["rows"] if row["data"] == data and row["name"] in (name, name + OTHERS)]
    timed = [row["server_cpu_s"] for row in rows if row["seed"] in SEEDS and row.get("server_cpu_s", 0) >= 0.05]
    if not timed:
        return ""
    return f"{fmean(timed):.0f}" if fmean(timed) >= 1 else f"{fmean(timed):.1f}"


def main() -> None:
    """Renew the pages."""
    for data, name in PAGES.items():
        page, text = DOCS / name, published(read_json(OUT), data=data)
        place = re.compile(rf"(?<=<!-- results: published:{data} -->\n)(\|.*\n)*")
        page.write_text(place.sub(lambda _, table=text: f"{table}\n", page.read_text(), count=1))


if __name__ == "__main__":
    main()
