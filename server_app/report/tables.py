"""Tables of means as CSV, as Markdown and as text for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fl_app.privacy import PrivacyConfig
from strategies.core.errors import printable

_FILE_WIDTH = 112  # letters per line outside a terminal
_LONG_WORD = 16


def output_console() -> Console:
    """Return the console of standard output, which marks, colours and draws no words of its own accord."""
    return Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as CSV; None becomes an empty field."""
    import pandas as pd

    # Without a type of their own the columns keep their values: a whole number stays one beside an empty field.
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))


def markdown_text(columns: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int, notes: Sequence[str]) -> str:
    """Return a Markdown table, the first note before it and the others after it.

    Args:
        columns: The column names.
        rows: One cell per column each.
        texts: Number of leading columns that hold texts; the others hold numbers and are right-aligned.
        notes: At least one sentence.
    """
    marks = ["---" if place < texts else "---:" for place in range(len(columns))]
    lines = (columns, marks, *([cell.replace("|", "\\|") for cell in row] for row in rows))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{notes[0]}\n\n{table}\n\n{' '.join(notes[1:])}\n"


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int, notes: Sequence[str], whole: int = 0
) -> None:
    """Print a table and its notes; the arguments are those of :func:`markdown_text`.

    Where space is short, texts are broken before numbers, and the texts of the first ``whole`` columns never.
    """
    console = output_console()
    console.width = max(console.width, _least_width([columns, *rows], texts, whole))  # else numbers would be cut
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if place < texts else "right"
        least = None if whole <= place < texts else _least([cells[place] for cells in (columns, *rows)], broken=False)
        table.add_column(column, justify=side, min_width=least, no_wrap=place < whole)
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(printable(notes[0]), soft_wrap=True)
    console.print(table)
    for note in notes[1:]:
        console.print(printable(note), soft_wrap=True)


def _least_width(rows: Sequence[Sequence[str]], texts: int, whole: int) -> int:
    """Return the width of a table in which texts alone are broken: between words, and within words that are long."""
    return sum(2 + _least(cells, broken=whole <= place < texts) for place, cells in enumerate(zip(*rows, strict=True)))


def _least(cells: Sequence[str], *, broken: bool) -> int:
    if not broken:
        return max(map(len, cells))
    return max(min(len(word), _LONG_WORD) for cell in cells for word in cell.split() or [""])


# The setting of a result in one line, for titles: data, split, clients and seed.


def split_line(settings: Mapping[str, Any]) -> str:
    """Return the law that divided the data, with its parameter: ``dirichlet-classes, alpha 0.3``; empty if unknown."""
    law = str(settings.get("data.law", ""))
    parts = [law] if law else []
    if law.startswith("dirichlet"):
        parts.append(f"alpha {settings['data.alpha']:g}")
    if law.startswith("classes"):
        parts.append(f"{settings['data.classes-per-client']} classes per client")
    if law and settings.get("data.sigma"):
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


# Refused clients with their reasons, each reason once.


def refusal_lines(refusals: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line per reason: ``node-3, node-7: no answer within 5 s``.

    Args:
        refusals: Entries with ``client`` and ``reason``, as in result.json.
    """
    clients: dict[str, list[str]] = {}
    for entry in refusals:
        clients.setdefault(entry["reason"], []).append(entry["client"])
    return [f"{', '.join(dict.fromkeys(named))}: {reason}" for reason, named in clients.items()]


# A result's facts about differential privacy.


def privacy_facts(privacy: PrivacyConfig, *, sums: bool = False) -> dict[str, Any]:
    """Return a result's facts about the clients' privacy; empty without privacy.

    Args:
        privacy: The settings.
        sums: Whether clients upload sums of features, not models.

    Returns:
        ``epsilon``, an upper bound, and ``delta`` of each client's upload; ``clip``; ``described``.
    """
    if not privacy.on:
        return {}
    facts = {"epsilon": privacy.epsilon, "delta": privacy.delta, "clip": privacy.clip}
    return {**facts, "described": privacy.described(sums=sums)}


def privacy_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a result's lines about privacy.

    Args:
        facts: See :func:`privacy_facts`; may be empty.
    """
    return [f"privacy: {facts['described']}"] if facts else []
