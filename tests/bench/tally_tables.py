"""The tables of attacks, of two classes per client, and of long schedules, from docs/results/.

The scripts that measured them stand in the commits that docs/results/scripts.json names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from measure import stored
from rivals import OUT as SHORT
from rivals import spread

Found = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
FEW = "two classes"  # the partitions whose clients have few classes begin so
CHANGES = (
    "none", "flipped labels", "flipped labels, update across noise", "flipped labels, update across real images",
    "eight bits", "noise of a tenth of the update", "noise as large as the update",
)  # fmt: skip
STUDENTS = ("noise", "noise and spanned images")
# Name in the table, and of the result whose curve it is -> method.
LONG = {"IntactOFL": "intactofl", "Co-Boosting": "co-boosting"}
EPOCHS = (10, 20, 50, 100, 150, 200)  # the columns of the table of long schedules


def unique(rows: Rows, *keys: str) -> list[tuple[Any, ...]]:
    """Return what rows have in some columns, each once, in the order of the rows."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def cells(rows: Rows, places: Sequence[Mapping[str, Any]], value: str = "accuracy") -> str:
    """Return the cells of a line of a table: mean and spread over the seeds of the rows that agree with each place."""
    own = [[row[value] for row in rows if place.items() <= row.items()] for place in places]
    return " | ".join(spread(pd.Series(values, dtype=float)) for values in own)


def _by_rule(rows: Rows) -> str:
    """Return a table with a row for each rule, and for its group if there are several."""
    heads = [(data, law) for (data,) in unique(rows, "data") for (law,) in unique(rows, "law")]
    heads = [head for head in heads if head in unique(rows, "data", "law")]
    groups = [group for (group,) in unique(rows, "group")]
    lines = [f"| | {' | '.join(f'{data}, {law}' for data, law in heads)} |", "|---|" + "---:|" * len(heads)]
    for group in groups:
        if len(groups) > 1:
            lines.append(f"| *{group}* |" + " |" * len(heads))
        for (rule,) in unique([row for row in rows if row["group"] == group], "rule"):
            places = [{"data": data, "law": law, "group": group, "rule": rule} for data, law in heads]
            lines.append(f"| {rule} | {cells(rows, places)} |")
    return "\n".join(lines)


def few_classes(found: Found) -> str:
    """Return every rule where each client has two classes."""
    return _by_rule([row for row in found["rows"] if row["law"].startswith(FEW)])


def more_classes(found: Found) -> str:
    """Return the gate of updates where clients have more classes."""
    return _by_rule([row for row in found["rows"] if not row["law"].startswith(FEW)])


def gate_attacks(found: Found) -> str:
    """Return a row for each rule under each attack."""
    rows = found["rows"]
    heads = [(data, law) for (data,) in unique(rows, "data") for (law,) in unique(rows, "law")]
    lines = [f"| attack | | {' | '.join(f'{data}, {law}' for data, law in heads)} |"]
    lines.append("|---|---|" + "---:|" * len(heads))
    pairs = [(attack, rule) for (attack,) in unique(rows, "attack") for (rule,) in unique(rows, "rule")]
    for attack, rule in pairs:
        places = [{"data": data, "law": law, "attack": attack, "rule": rule} for data, law in heads]
        lines.append(f"| {attack} | {rule} | {cells(rows, places)} |")
    return "\n".join(lines)


def student_attacks(found: Found) -> str:
    """Return a row for each change of the uploads: the ensembles, and the two students."""
    data = [name for (name,) in unique(found["rows"], "data")]
    titles = [f"{name}, {what}" for name in data for what in ("ensemble", *STUDENTS)]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for change in CHANGES:
        own = []
        for name in data:
            places = [{"data": name, "change": change, "images": images} for images in STUDENTS]
            own += [cells(found["rows"], places[:1], "ensemble"), cells(found["rows"], places, "student")]
        lines.append(f"| {change} | {' | '.join(own)} |")
    return "\n".join(lines)


def gatekeeper(found: Found) -> str:
    """Return a row per skew and attack: missed attackers and false alarms, with their intervals at 95 %."""
    lines = ["| alpha | attack | missed | 95 % interval | false alarms | 95 % interval |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        missed = f"{row['missed']} of {row['cohorts']} | {_interval(row['missed %'])}" if "missed" in row else "- | -"
        alarms = f"{row['alarms']} of {row['honest']} | {_interval(row['alarms %'])}"
        lines.append(f"| {row['alpha']} | {row['attack']} | {missed} | {alarms} |")
    return "\n".join(lines)


def _interval(bounds: Sequence[float]) -> str:
    return f"{bounds[0]:.1f} to {bounds[1]:.1f} %"


def long_schedules(found: Found) -> str:
    """Return a row per method and seed: its short schedule, its curve, its last epoch, and its CPU seconds."""
    titles = ["after 12 short epochs", *(f"{epoch}" for epoch in EPOCHS), "best tenth epoch", "CPU s"]
    lines = [f"| | {' | '.join(titles)} |", f"|---{'|---:' * len(titles)}|"]
    for row in found["rows"]:
        curve, place = dict(row["curve"]), ("digits", row["seed"], LONG[row["name"]])
        short = [
            f"{other['accuracy'][row['name']]:.1f}"
            for other in stored(SHORT)
            if (other["data"], other["seed"], other["name"]) == place
        ]
        own = [*(short or [""]), *(f"{curve[epoch]:.1f}" if epoch in curve else "" for epoch in EPOCHS)]
        own += [f"{max(curve.values()):.1f}", f"{row['server_cpu_s']:.0f}"]
        lines.append(f"| {row['name']}, seed {row['seed']} | {' | '.join(own)} |")
    return "\n".join(lines)


TABLES = {
    "two_classes:few": (few_classes, "lab/two-classes.md"),
    "two_classes:more": (more_classes, "lab/two-classes.md"),
    "gate_attacks": (gate_attacks, "lab/crafted-updates.md"),
    "student_attacks": (student_attacks, "lab/attacks-on-students.md"),
    "long_schedules": (long_schedules, "lab/longer-schedules.md"),
    "gatekeeper-fresh": (gatekeeper, "lab/gatekeeper.md"),
}
