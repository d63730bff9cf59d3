"""The tables of FLBoost's input space, loss and rate, from docs/results/flboost_space.json.

The student's rate is chosen on the selection half of the test images, by the mean of rounds 11 to 20; the chosen rates
are scored on the report half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rivals import apart, spread

Found = Mapping[str, Any]
SPACES, LOSSES, RATES = ("half", "data-set"), ("mean", "sum"), (0.1, 1.0, 0.05, 0.01)
LATE = 10  # the rounds after it choose
TITLES = {
    "half": "this app's space, (x - 0.5) / 0.5",
    "data-set": "the release's space, `data.normalization=data-set`",
}


def chosen_rate(found: Sequence[dict[str, Any]], space: str, loss: str) -> float:
    """Return the rate that the selection half chooses among the measured ones; 0 if there is none."""
    own = {
        row["rate"]: late(row["curve"])
        for row in found
        if (row["space"], row["loss"], row["half"]) == (space, loss, "selection")
    }
    return max(own, key=lambda rate: own[rate], default=0.0)


def late(curve: Sequence[float]) -> float:
    """Return the mean accuracy, in %, of the rounds after :data:`LATE`."""
    return float(pd.Series(curve[LATE:], dtype=float).mean())


def rates(found: Found) -> str:
    """Return the mean accuracy of the late rounds by space, loss and rate, on the half that chooses."""
    columns = sorted(RATES)
    lines = ["| " + " | ".join(["", *(f"{rate:g}" for rate in columns)]) + " |", "|---" + "|---:" * len(columns) + "|"]
    for space in reversed(SPACES):
        for loss in LOSSES:
            own = {
                row["rate"]: late(row["curve"])
                for row in found["rows"]
                if (row["space"], row["loss"], row["half"]) == (space, loss, "selection")
            }
            if own:
                cells = [f"{own[rate]:.1f}" if rate in own else "" for rate in columns]
                lines.append(f"| {TITLES[space]}, KL's {loss} over classes | {' | '.join(cells)} |")
    return "\n".join(lines)


def reports(found: Found) -> str:
    """Return FedAvg and FLBoost over it, in each space, at the chosen rates and over the seeds, on the other half."""
    titles = ["", "rate", "round 1", "rounds 11 to 20", "round 20", "rounds 11 to 20, less FedAvg"]
    lines = [f"| {' | '.join(titles)} |", f"|---{'|---:' * (len(titles) - 1)}|"]
    for space in reversed(SPACES):
        lines.append(f"| *{TITLES[space]}* |{' |' * (len(titles) - 1)}")
        base = _by_seed(found, space, "")
        lines.append(f"| FedAvg | | {' | '.join(_cells(base))} | |")
        for loss in LOSSES:
            rate = chosen_rate(found["rows"], space, loss)
            own = _by_seed(found, space, loss, rate)
            if not own.empty:
                gain = apart(_late(own), _late(base))
                lines.append(f"| FLBoost, KL's {loss} | {rate:g} | {' | '.join(_cells(own))} | {gain} |")
    return "\n".join(lines)


TABLES = {"flboost_space:rates": rates, "flboost_space:reports": reports}


def _by_seed(found: Found, space: str, loss: str, rate: float = 0.0) -> pd.DataFrame:
    """Return the curves at a rate on the half that reports, a column per round, a row per seed."""
    own = (space, loss, rate, "report")
    rows = [row for row in found["rows"] if (row["space"], row["loss"], row["rate"], row["half"]) == own]
    return pd.DataFrame({row["seed"]: row["curve"] for row in rows}, dtype=float).T


def _late(curves: pd.DataFrame) -> pd.Series[float]:
    return curves.iloc[:, LATE:].mean(axis=1)


def _cells(curves: pd.DataFrame) -> list[str]:
    if curves.empty:
        return ["", "", ""]
    return [spread(curves.iloc[:, 0]), spread(_late(curves)), spread(curves.iloc[:, -1])]
