"""The result of an inspection: one row per client, with its findings and verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RANDOM = "random"
SCALED = "scaled"
COPY = "copy"
LABEL_FLIP = "label-flip"
BACKDOOR = "backdoor"
OK = "ok"
SUSPECT = "suspect"

# Measure -> its column's title. Those of RATIOS are compared on a logarithmic scale.
MEASURES: Mapping[str, str] = {
    "agreement": "agreement",
    "likeness": "likeness",
    "nearest": "nearest",
    "norm": "norm",
    "statistics": "BN",
    "logits": "logits",
    "variation": "variation",
    "trigger": "trigger",
    "transfer": "transfer",
    "influence": "influence",
    "apart": "apart",
    "claim": "claim",
}
RATIOS = ("nearest", "norm", "statistics", "logits", "variation", "trigger")


@dataclass(frozen=True)
class Finding:
    """A reason to suspect an upload: the kind of harm, and its evidence in one sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class VerdictRow:
    """The inspection's result for one client.

    Attributes:
        measures: Measure -> value; NaN marks a value that was not measured.
        scores: Measure -> distance from the other clients in robust deviations; NaN as above.
        findings: Empty for an upload without suspicion.
    """

    client: str
    architecture: str
    measures: Mapping[str, float]
    scores: Mapping[str, float]
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> str:
        """``"suspect"`` if there is a finding, else ``"ok"``."""
        return SUSPECT if self.findings else OK

    @property
    def harm(self) -> str:
        """The kind of harm of the first finding; empty without one."""
        return self.findings[0].kind if self.findings else ""

    @property
    def reason(self) -> str:
        """The findings in one line."""
        return "; ".join(f"{finding.kind}: {finding.text}" for finding in self.findings)


@dataclass(frozen=True)
class Inspection:
    """The inspection's result for a cohort.

    Attributes:
        rows: One per client, in the order of the job.
        notes: The parts that could not be judged, with the reasons, a line each.
        seconds: Wall time of the inspection.
    """

    rows: tuple[VerdictRow, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def suspects(self) -> tuple[str, ...]:
        """Names of the clients with a finding."""
        return tuple(row.client for row in self.rows if row.findings)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values, with None for NaN."""
        rows = [
            {
                "client": row.client,
                "architecture": row.architecture,
                "verdict": row.verdict,
                "harm": row.harm,
                "findings": [{"kind": finding.kind, "text": finding.text} for finding in row.findings],
                "measures": _round(row.measures),
                "scores": _round(row.scores),
            }
            for row in self.rows
        ]
        return {"clients": rows, "notes": list(self.notes), "seconds": round(self.seconds, 2)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Inspection:
        """Return the inspection whose :meth:`as_json` is given."""
        rows = tuple(
            VerdictRow(
                row["client"],
                row["architecture"],
                _numbers(row["measures"]),
                _numbers(row["scores"]),
                tuple(Finding(found["kind"], found["text"]) for found in row["findings"]),
            )
            for row in value["clients"]
        )
        return cls(rows, tuple(value["notes"]), float(value["seconds"]))

    def table(self) -> list[str]:
        """Return the rows as lines of a table, with every measure that some client has, and the verdict."""
        shown = [name for name in MEASURES if any(not math.isnan(_of(row, name)) for row in self.rows)]
        width = max([6, *(len(row.client) for row in self.rows)])
        lines = [f"{'client':<{width}}" + "".join(f"{MEASURES[name]:>11}" for name in shown) + "  verdict"]
        for row in self.rows:
            cells = "".join(f"{_cell(_of(row, name)):>11}" for name in shown)
            lines.append(f"{row.client:<{width}}{cells}  {row.verdict}{f' ({row.harm})' if row.harm else ''}")
        return lines


def _of(row: VerdictRow, name: str) -> float:
    return row.measures.get(name, math.nan)


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _round(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: round(value, 4) if math.isfinite(value) else None for name, value in values.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def some_pairs(pairs: Sequence[tuple[int, int]], most: int = 3) -> str:
    """Return ``1 for 8, 4 for 5, ...``."""
    text = ", ".join(f"{one} for {other}" for one, other in pairs[:most])
    return text + (", ..." if len(pairs) > most else "")
