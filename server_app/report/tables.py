"""Tables of means as CSV, as Markdown and as text for a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console

from fl_app.privacy import PrivacyConfig
from strategies.core.errors import printable
from strategies.core.facts import HEADLINES, in_percent

_FILE_WIDTH = 112  # letters per line outside a terminal
_LONG_WORD = 16


def headline(row: Mapping[str, Any], metric: str) -> float | None:
    """Return the headline score of a row of a result: in %, a log loss in nats; None if the row lacks it."""
    if metric == "accuracy":  # runs of earlier versions have no other score
        return None if row["accuracy"] is None else float(row["accuracy"])
    score = row.get("scores", {}).get(metric)
    return None if score is None else float(score["value"]) * scale_of(metric)


def best_headline(result: Mapping[str, Any], metric: str) -> float | None:
    """Return the headline score of a result's best epoch, as :func:`headline`; None if it is not known."""
    return result["best_accuracy"] if metric == "accuracy" else result.get("best_score")


def headline_cells(row: Mapping[str, Any], metric: str) -> tuple[str, str]:
    """Return the headline score of a row and its 95 % interval as texts; ``-`` where one is unknown."""
    value, score = headline(row, metric), row.get("scores", {}).get(metric, {})
    shown = "-" if value is None else f"{value:.{places_of(metric)}f}"
    if score.get("low") is None:
        return shown, "-"
    low, high = (score[end] * scale_of(metric) for end in ("low", "high"))
    return shown, f"{low:.{places_of(metric) - 1}f} to {high:.{places_of(metric) - 1}f}"


def scale_of(metric: str) -> float:
    """Return the factor from a score to the number that tables show."""
    return 100.0 if in_percent(metric) else 1.0


def places_of(metric: str) -> int:
    """Return the decimal places of a score in tables."""
    return 2 if in_percent(metric) else 3


def gain_text(found: Mapping[str, Any], metric: str) -> str:
    """Return a difference of scores with the ends of its interval: ``+1.2 (-0.3 to +2.7)``, in points or nats."""
    value, low, high = (found[key] * scale_of(metric) for key in ("value", "low", "high"))
    places = places_of(metric) - 1
    return f"{value:+.{places}f} ({low:+.{places}f} to {high:+.{places}f})"


def worded(metric: str) -> str:
    """Return the name of a score in words: ``balanced accuracy``; one of the user's own as it is."""
    return metric.replace("-", " ").replace("auroc", "AUROC").replace("f1", "F1") if metric in HEADLINES else metric


def unit_of(metric: str, *, apart: bool = False) -> str:
    """Return the unit of a score, or of a difference with ``apart``; empty for a score of the user's own."""
    return ("points" if apart else "%") if in_percent(metric) else "nats" if metric in HEADLINES else ""


def titled(metric: str, where: str = "", *, apart: bool = False) -> str:
    """Return the name of a score with its unit: ``balanced accuracy, %``.

    Args:
        where: What it is counted on.
        apart: Whether it is a difference.
    """
    unit = unit_of(metric, apart=apart)
    return f"{worded(metric)}{f' on {where}' * bool(where)}{f', {unit}' * bool(unit)}"


def scored_on(result: Mapping[str, Any]) -> str:
    """Return what the scores of a result's table are counted on."""
    clients = result.get("evaluation", {}).get("on") == "clients"
    return "all the clients' own examples" if clients else "held-out examples"


def unscored_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the line of a result without scores, and why it has none; no line for one with scores."""
    if result["table"]:
        return []
    return [f"no scores: {result.get('unscored', 'the result was scored on no examples')}"]


def output_console() -> Console:
    """Return the console of standard output, which marks, colours and draws no words of its own accord."""
    return Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


@dataclass(frozen=True)
class Table:
    """A table of a page, a terminal or a Markdown file.

    Attributes:
        texts: The number of leading columns that hold texts; the others hold numbers.
        shades: On a page, of every row the shares in 0 to 1 by which its cells of numbers are shaded; empty for none.
        bars: On a page, of every row the share in 0 to 1 of a bar behind its last number; empty for none.
        strong: On a page, the rows in bold type.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    notes: Sequence[str] = ()
    shades: Sequence[Sequence[float]] = ()
    bars: Sequence[float] = ()
    strong: frozenset[int] = frozenset()

    def markdown(self) -> str:
        """Return heading, table and notes as Markdown."""
        marks = ["---" if place < self.texts else "---:" for place in range(len(self.columns))]
        lines = (self.columns, marks, *([cell.replace("|", "\\|") for cell in row] for row in self.rows))
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.heading}\n\n{table}\n\n{' '.join(self.notes)}\n"

    def print(self, *, whole: int = 0) -> None:
        """Print heading, table and notes.

        Where space is short, texts are broken before numbers, and the texts of the first ``whole`` columns never.
        """
        console = output_console()
        columns = list(zip(self.columns, *self.rows, strict=True))
        numbers = [whole <= place < self.texts for place in range(len(columns))]
        least = [_least(cells, broken=broken) for cells, broken in zip(columns, numbers, strict=True)]
        console.width = max(console.width, sum(2 + width for width in least))  # else numbers would be cut
        shown = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for place, (name, width, broken) in enumerate(zip(self.columns, least, numbers, strict=True)):
            shown.add_column(
                name,
                justify="left" if place < self.texts else "right",
                min_width=None if broken else width,
                no_wrap=not broken,  # else Rich narrows them first, and cuts what comes after them
            )
        for row in self.rows:
            shown.add_row(*map(printable, row))
        console.print(printable(self.heading), soft_wrap=True)
        console.print(shown)
        for note in self.notes:
            console.print(printable(note), soft_wrap=True)


def write_out(
    table: Callable[[], Table], form: str, *, facts: Any, rows: Callable[[], Sequence[Mapping[str, Any]]]
) -> None:
    """Write a result to standard output, for a reader or for a program.

    Args:
        table: Returns the table, for the forms ``"text"`` and ``"md"``.
        form: ``"text"``, ``"json"``, ``"csv"`` or ``"md"``.
        facts: Everything, for ``"json"``.
        rows: Returns rows with the same keys, for ``"csv"``; None becomes an empty field.
    """
    sys.stderr.flush()
    if form == "text":
        table().print()
    elif form == "json":
        sys.stdout.write(json.dumps(facts) + "\n")
    elif form == "md":
        sys.stdout.write(table().markdown())
    else:
        import pandas as pd

        # Without a type of their own the columns keep their values: a whole number stays one beside an empty field.
        sys.stdout.write(pd.DataFrame(rows(), dtype=object).to_csv(index=False, lineterminator="\n"))
    sys.stdout.flush()


def _least(cells: Sequence[str], *, broken: bool) -> int:
    if not broken:
        return max(map(len, cells))
    return max(min(len(word), _LONG_WORD) for cell in cells for word in cell.split() or [""])


def split_line(settings: Mapping[str, Any]) -> str:
    """Return how the data was divided: ``dirichlet-classes, alpha 0.3``; empty if unknown."""
    partition = str(settings.get("data.partition", ""))
    if settings.get("model.train") and ":" in settings.get("data.name", "") and partition.startswith("dirichlet"):
        partition = "dirichlet over sizes"  # targets in place of classes
    parts = [partition] if partition else []
    if partition.startswith("dirichlet"):
        parts.append(f"alpha {settings['data.alpha']:g}")
    if partition.startswith("classes"):
        parts.append(f"{settings['data.classes-per-client']} classes per client")
    if partition and settings.get("data.sigma"):
        parts.append(f"sigma {settings['data.sigma']:g}")
    return ", ".join(parts)


def data_line(settings: Mapping[str, Any]) -> str:
    """Return the data set, with the domain that is left out: ``pacs without sketch``; empty if unknown."""
    left_out = settings.get("data.left-out", "")
    return f"{settings.get('data.name', '')}{f' without {left_out}' if left_out else ''}"


def setting_line(settings: Iterable[Mapping[str, Any]], clients: Iterable[int], seeds: Iterable[int]) -> str:
    """Return the setting of one or several runs; where they differ, their values stand side by side.

    Args:
        settings: Flat settings of each run; empty for a run of another project.
        clients: Number of clients of each run; 0 where it is unknown.
        seeds: All seeds; none where nothing has finished.

    Returns:
        A line such as ``digits · split dirichlet-classes, alpha 0.3 · 5 clients · seed 0``.
    """
    runs, numbers = list(settings), sorted(set(seeds))
    data, split = (_joined(map(line, runs)) for line in (data_line, split_line))
    count = _joined(str(number) for number in sorted(set(clients)) if number)
    drawn = f"seed{'s' * (len(numbers) > 1)} {_joined(map(str, numbers))}" if numbers else ""
    found = [data, f"split {split}" if split else "", f"{count} client{'s' * (count != '1')}" if count else "", drawn]
    return " · ".join(part for part in found if part)


def _joined(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(text for text in texts if text))


def refusal_lines(refusals: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line per reason: ``node-3, node-7: no answer within 5 s``."""
    clients: dict[str, list[str]] = {}
    for entry in refusals:
        clients.setdefault(entry["reason"], []).append(entry["client"])
    return [f"{', '.join(dict.fromkeys(named))}: {reason}" for reason, named in clients.items()]


def privacy_facts(privacy: PrivacyConfig, *, sums: bool = False) -> dict[str, Any]:
    """Return a result's facts about the clients' privacy; empty without privacy.

    Args:
        sums: Whether clients upload sums of features, not models.

    Returns:
        ``epsilon``, an upper bound, and ``delta`` of each client's upload; ``clip``; ``described``.
    """
    if not privacy.on:
        return {}
    facts = {"epsilon": privacy.epsilon, "delta": privacy.delta, "clip": privacy.clip}
    return {**facts, "described": privacy.described(sums=sums)}


def privacy_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a result's lines about privacy."""
    return [f"privacy: {facts['described']}"] if facts else []
