"""The figures of all methods on the same uploads: ``make results``.

It renews the tables of docs/lab/same-uploads.md and of the methods' pages from docs/results/rivals.json, which a
script of the history measured: docs/results/scripts.json names its commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from strategies.run.files import read_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
OUT = RESULTS / "rivals.json"
PAGES = (ROOT / "docs" / "lab" / "same-uploads.md", *sorted((ROOT / "docs" / "methods").glob("*.md")))
SEEDS = range(3)
DATA = ("digits", "Fashion-MNIST", "CIFAR-10")
# The replays that train on the server.
TRAINED = {
    "tally", "tally, read off", "intactofl, predictions", "intactofl", "intactofl, code", "co-boosting", "dense",
    "f-dafl", "f-adi",
}  # fmt: skip
Place = tuple[str, str]  # a replay, and the start of a name in its table of results
UNCHANGED, REPORTED = "clients upload only a model", "clients also report class counts"
ASKED = "clients answer again"
REPORTED_AND_ASKED = f"{REPORTED}, and answer again"
TRAIN = "clients train differently"
# Group -> row -> its place.
GROUPS: dict[str, dict[str, Place]] = {
    f"{UNCHANGED}: ensembles": {
        "FedENS": ("fedens", "FedENS"),
        "mean of probabilities": ("mean of probabilities", "FedENS"),
        "Co-Boosting ensemble": ("co-boosting", "Co-Boosting ensemble"),
        "IntactOFL": ("intactofl", "IntactOFL"),
        "IntactOFL, images moved by 8, as in its code": ("intactofl, code", "IntactOFL"),
        "IntactOFL's experts, gate on predictions": ("intactofl, predictions", "IntactOFL"),
        "**Tally ensemble, estimated counts**": ("tally, read off", "Tally ensemble"),
    },
    f"{UNCHANGED}: one model": {
        "FedAvg": ("fedens", "FedAvg (one shot)"),
        "F-ADI": ("f-adi", "F-ADI"),
        "F-DAFL": ("f-dafl", "F-DAFL"),
        "DENSE": ("dense", "DENSE"),
        "Co-Boosting": ("co-boosting", "Co-Boosting"),
        "**Tally, estimated counts**": ("tally, read off", "Tally"),
    },
    f"{REPORTED}: ensembles": {
        "Label-count ensemble": ("label-count-ensemble", "Label-count ensemble"),
        "Tally ensemble": ("tally", "Tally ensemble"),
    },
    f"{REPORTED}: one model": {"Tally": ("tally", "Tally")},
    f"{TRAIN}: ensembles": {
        "FAFI": ("fafi", "FAFI"),
        "FAFI, `fafi.fusion=noise`": ("fafi, noise", "FAFI"),
        "FedOV": ("fedov", "FedOV"),
    },
    f"{TRAIN}: one model": {"FedCVAE-Ens": ("fedcvae-ens", "FedCVAE-Ens")},
    # The weights of conf/fens-deployment.toml start from label counts.
    f"{REPORTED_AND_ASKED}: ensemble": {"FENS, 20 rounds with the clients": ("run", "FENS")},
    f"{ASKED}: ensemble": {
        "FuseFL, 15 + 15 local epochs in three exchanges": ("fusefl", "FuseFL"),
        "FuseFL, 30 + 30 local epochs": ("fusefl, long", "FuseFL"),
    },
}
HEADLINE = {"ensembles": "**Tally ensemble, estimated counts**", "one model": "**Tally, estimated counts**"}


def accuracies(rows: Iterable[Mapping[str, Any]], data: str, place: Place) -> pd.Series[float]:
    """Return the accuracies in % of a row of the tables, by the seed."""
    name, entry = place
    found = {row["seed"]: row["accuracy"][entry] for row in rows if (row["data"], row["name"]) == (data, name)}
    return pd.Series(found, dtype=float)


def spread(values: pd.Series[float], sign: str = "") -> str:
    """Return mean and sample standard deviation, as ``82.2 ± 2.6``; with a star for fewer than three values."""
    average = round(values.mean(), 9)  # a tie at the last digit is one, whatever the order of the sum
    if len(values) < len(SEEDS):
        return "" if values.empty else f"{average:{sign}.1f}*"
    return f"{average:{sign}.1f} ± {values.std():.1f}"


def server_seconds(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the CPU seconds of a replay on CIFAR-10, seed 0, beyond those of a method that trains nothing."""
    taken = {row["name"]: row["cpu_s"] for row in rows if (row["data"], row["seed"]) == ("CIFAR-10", 0)}
    return f"{taken[name] - taken['label-count-ensemble']:.0f}" if name in TRAINED & taken.keys() else ""


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of accuracies, a group for each assumption."""
    lines = [f"| | {' | '.join(DATA)} | CPU s |", f"|---{'|---:' * len(DATA)}|---:|"]
    for group, members in GROUPS.items():
        lines.append(f"| *{group}* |{' |' * len(DATA)} |")
        for name, place in members.items():
            cells = [spread(accuracies(rows, data, place)) for data in DATA]
            lines.append(f"| {name} | {' | '.join(cells)} | {server_seconds(rows, place[0])} |")
    return "\n".join(lines)


def differences(rows: list[dict[str, Any]]) -> str:
    """Return the table of paired differences: Tally with estimated counts, less each rival of its group."""
    lines = [f"| Tally less | {' | '.join(DATA)} |", f"|---{'|---:' * len(DATA)}|"]
    for kind, headline in HEADLINE.items():
        members = GROUPS[f"{UNCHANGED}: {kind}"]
        lines.append(f"| *{kind}* |{' |' * len(DATA)}")
        for name, place in members.items():
            if name != headline:
                cells = [paired(rows, data, members[headline], place) for data in DATA]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def paired(rows: list[dict[str, Any]], data: str, own: Place, rival: Place) -> str:
    """Return :func:`apart` of two rows of the tables."""
    return apart(accuracies(rows, data, own), accuracies(rows, data, rival))


def apart(own: pd.Series[float], rival: pd.Series[float]) -> str:
    """Return the difference of two rows over the seeds that both have, and in how many of them it is positive."""
    found = (own - rival).dropna()  # by the seed
    return "" if found.empty else f"{spread(found, '+')} ({int((found > 0).sum())} of {len(found)})"


def written(text: str, tables: Iterable[str]) -> str:
    """Return a page in whose tables with the same head the rows of the same names are those of these tables."""
    for lines in (table.splitlines() for table in tables):
        rows = {name_of(line): line for line in lines[2:]}
        old, inside, new = text.split("\n"), False, []
        for line in old:
            inside = line == lines[0] or (inside and line.startswith("|"))
            new.append(rows.get(name_of(line), line) if inside else line)
        text = "\n".join(new)
    return text


def name_of(line: str) -> str:
    """Return the name of a row of a table."""
    return line.split("|")[1].strip() if line.startswith("|") else ""


def main() -> None:
    """Renew the pages."""
    rows = read_json(OUT)["rows"]
    for page in PAGES:
        page.write_text(written(page.read_text(), (table(rows), differences(rows))))


if __name__ == "__main__":
    main()
