"""Tables of means as CSV, as Markdown and as text for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

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
