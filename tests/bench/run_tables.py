"""Tables of docs/results and docs/lab, which tests/bench/feature_tables.py makes from stored results of whole runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pandas as pd
from same_uploads import ASKED, REPORTED, REPORTED_AND_ASKED, UNCHANGED, apart, spread

ALPHAS, SEEDS = (0.1, 0.05, 0.3), range(3)
HEADLINE, HEADLINE_SEEDS = ("fashion-mnist", 0.1), range(10)  # the data set and the skew with more seeds
MEASURED = ("fashion-mnist", "mnist")  # the data sets that have a table
EPOCHS = (10, 20, 50, 100, 150, 200, 300, 400, 500)  # of a curve
# Ends the name of a row whose clients have the partition of the tables' clients, and were trained by another processor.
OTHERS = ", clients of another processor"
STUDENT, TITLES = "student's step", {"lenet5": "LeNet-5", "cnn5": "CNN5"}  # of the table of a GPU
# Centre in docs/results/heart_disease.json -> its name.
CENTRES = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach"}
Found = Mapping[str, Any]
Entry = tuple[str, str]  # a row's name in docs/results/published.json, and one of its accuracies
# Group -> row -> its entry; Tally's row stands last in the groups that it leads or not.
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
    f"{REPORTED_AND_ASKED}: ensemble": {"FENS, 20 rounds with the clients": ("fens", "FENS")},
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
    lines = _head("", [*titles, "CPU s"])
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


def differences(found: Found, *, data: str) -> str:
    """Return the paired differences of Tally, the last row of its groups, and their other rows, over the seeds."""
    alphas = _measured(found, data)
    lines = _head("", [f"alpha {alpha:g}" for alpha in alphas])
    for group, members in GROUPS.items():
        *rivals, (headline, own) = members.items()
        rows = []
        for title, entry in rivals if group != REPORTED else ():
            cells = [apart(*(_accuracies(found, data, alpha, each) for each in (own, entry))) for alpha in alphas]
            if any(cells):
                rows.append(f"| {title} | {' | '.join(cells)} |")
        if rows:
            lines += [f"| *{headline.strip('*')}, less* |{' |' * len(alphas)}", *rows]
    return "\n".join(lines)


def more_seeds(found: Found) -> str:
    """Return the rows of the cell with more seeds than three: spread, range, and paired differences."""
    of = partial(_accuracies, found, *HEADLINE, seeds=HEADLINE_SEEDS)
    baseline = of(GROUPS[f"{UNCHANGED}: ensembles"]["FedENS"])
    lines = _head("", ["mean", "worst seed", "best seed", "less FedENS", "Tally less this one"])
    for group, members in GROUPS.items():
        own, rows = of([*members.values()][-1]), []
        for title, entry in members.items():
            found_here = of(entry)
            if len(found_here) > len(SEEDS):
                behind = "" if group == REPORTED or own.equals(found_here) else apart(own, found_here)
                over = "" if title == "FedENS" else apart(found_here, baseline)
                extremes = f"{found_here.min():.1f} | {found_here.max():.1f}"
                rows.append(f"| {title} | {spread(found_here)} | {extremes} | {over} | {behind} |")
        if rows:
            lines += [f"| *{group}* |{' |' * 5}", *rows]
    return "\n".join(lines)


def over_fedens(found: Found, *, data: str) -> str:
    """Return the points that rows of unchanged clients have over FedENS on the same uploads, beside the paper's."""
    alphas, paper = _measured(found, data), PAPER[data]
    lines = _head("More than FedENS", [title for alpha in alphas for title in (f"alpha {alpha:g}", "paper")])
    baseline = GROUPS[f"{UNCHANGED}: ensembles"]["FedENS"]
    groups = (members for group, members in GROUPS.items() if group.startswith(UNCHANGED))
    for title, entry in (item for members in groups for item in members.items()):
        cells = []
        for alpha in alphas:
            own = _accuracies(found, data, alpha, entry)
            plain = _accuracies(found, data, alpha, baseline, beside=entry)
            printed = f"{paper[alpha][title] - paper[alpha]['FedENS']:+.1f}" if title in paper[alpha] else ""
            cells += [spread((own - plain).dropna(), "+"), printed]
        if title != "FedENS" and any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(found: Found, *, data: str) -> str:
    """Return the students' accuracies over the server epochs, a row per run of at least fifty.

    A method has one curve on a partition: of a run that has ended if there is one, and on the tables' clients if any.
    """
    long = [row for row in found["rows"] if row["data"] == data and row.get("curve") and row["curve"][-1][0] >= 50]
    worst_first = sorted(long, key=lambda row: (bool(row["accuracy"]), not row["name"].endswith(OTHERS)))
    rows = {_stage_of(row): row for row in worst_first}
    lines = _head("", [*(f"{epoch}" for epoch in EPOCHS), "best", "last", "last epoch"])
    for (name, alpha, seed), row in sorted(
        rows.items(), key=lambda item: (item[0][0], ALPHAS.index(item[0][1]), item[0][2])
    ):
        curve = dict(row["curve"])
        last = max(curve)
        cells = [f"{curve[epoch]:.1f}" if epoch in curve else "" for epoch in EPOCHS]
        cells += [f"{row.get('best', max(curve.values())):.1f}", f"{curve[last]:.1f}", f"{last}"]
        lines.append(f"| {name}, alpha {alpha:g}, seed {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Name of a mark -> how its table is made of the file in docs/results/ before the colon, and its page in docs/.
def centres(found: Found, *, score: str, gains: bool) -> str:
    """Return the scores of each hospital, in %: what its own model has, then each way."""
    first = found["rows"][0]["centres"]
    trained = [row["centres"] for row in found["rows"] if row["way"] == "fedavg"]
    own = [_over_draws([each[name]["own"][score] for each in trained]) for name in first]
    lines = _head("", [*CENTRES.values(), *([] if gains else ["all patients"])])
    lines += [] if gains else [f"| own model | {' | '.join(own)} | |"]
    for way in dict.fromkeys(row["way"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["way"] == way]
        if gains and rows[0]["centres"]["cleveland"]["gain"] is None:
            continue
        cells = [
            [row["centres"][name]["gain"] if gains else row["centres"][name]["result"][score] for row in rows]
            for name in first
        ]
        cells += [] if gains else [[row["pooled"][score] for row in rows]]
        lines.append(f"| `{way}` | {' | '.join(_over_draws(cell, signed=gains) for cell in cells)} |")
    return "\n".join(lines)


def _over_draws(values: Sequence[Any], *, signed: bool = False) -> str:
    """Return the mean of some scores in %, and of the ends of their intervals, if all draws have it."""
    if any(value is None for value in values):
        return "-"
    sign = "+" if signed else ""
    if not isinstance(values[0], Mapping):
        return f"{100 * fmean(values):{sign}.1f}"
    value, low, high = (100 * fmean(each[end] for each in values) for end in ("value", "low", "high"))
    return f"{value:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


TABLES: dict[str, tuple[Callable[[Found], str], str]] = {
    "heart_disease:gains": (partial(centres, score="auroc", gains=True), "lab/heart-disease.md"),
    "heart_disease:auroc": (partial(centres, score="auroc", gains=False), "lab/heart-disease.md"),
    "heart_disease:balanced": (partial(centres, score="balanced-accuracy", gains=False), "lab/heart-disease.md"),
    **{f"published:{data}": (partial(published, data=data), f"results/{data}.md") for data in MEASURED},
    **{
        f"published:{data}, {name}": (partial(made, data=data), f"lab/{page}.md")
        for data in MEASURED
        for name, made, page in (
            ("differences", differences, "published-schedule"),
            ("over FedENS", over_fedens, "published-schedule"),
            ("curves", curves, "long-server-stages"),
        )
    },
    "published:more seeds": (more_seeds, "lab/ten-seeds.md"),
    "published:cifar10": (partial(published, data="cifar10"), "lab/cifar10-published.md"),
}


def _head(first: str, titles: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(titles)} |", f"|---{'|---:' * len(titles)}|"]


def _measured(found: Found, data: str) -> list[float]:
    """Return the skews of a data set that have results, 0.1 first."""
    return [
        ALPHAS[0],
        *(alpha for alpha in ALPHAS[1:] if any((row["data"], row["alpha"]) == (data, alpha) for row in found["rows"])),
    ]


def _accuracies(
    found: Found, data: str, alpha: float, entry: Entry, seeds: Sequence[int] = SEEDS, *, beside: Entry | None = None
) -> pd.Series[float]:
    """Return the accuracies in % by the seed.

    A seed without a result on the tables' clients has that on clients of another processor. With ``beside``, each seed
    has the result on those clients on which that entry has its own.
    """
    name, outcome = entry
    whose = _clients(found, data, alpha, beside or entry)
    rows = [
        row
        for row in found["rows"]
        if (row["data"], row["alpha"]) == (data, alpha)
        and row["name"] == name + whose.get(row["seed"], "")
        and row["seed"] in seeds
    ]
    return pd.Series({row["seed"]: row["accuracy"][outcome] for row in rows if outcome in row["accuracy"]}, dtype=float)


def _clients(found: Found, data: str, alpha: float, entry: Entry) -> dict[int, str]:
    """Return on whose clients an entry has its result, by the seed: ``""`` for the tables', or :data:`OTHERS`."""
    name, outcome = entry
    rows = [row for row in found["rows"] if (row["data"], row["alpha"]) == (data, alpha) and outcome in row["accuracy"]]
    return {row["seed"]: clients for clients in (OTHERS, "") for row in rows if row["name"] == name + clients}


def _stage_of(row: Found) -> tuple[str, float, int]:
    """Return method, skew and seed of a row."""
    return row["name"].partition(OTHERS)[0], row["alpha"], row["seed"]


def _seconds(found: Found, data: str, name: str) -> str:
    """Return the mean CPU seconds of a server stage over the cells; an ensemble that computes nothing has none."""
    rows = [row for row in found["rows"] if row["data"] == data and row["name"] in (name, name + OTHERS)]
    timed = [row["server_cpu_s"] for row in rows if row["seed"] in SEEDS and row.get("server_cpu_s", 0) >= 0.05]
    if not timed:
        return ""
    return f"{fmean(timed):.0f}" if fmean(timed) >= 1 else f"{fmean(timed):.1f}"
