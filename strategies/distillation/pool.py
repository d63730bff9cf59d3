"""The pool: the synthetic images that a run has made so far, with further columns for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor


class Pool:
    """A growing table of equally long columns, in memory; row i of every column belongs to image i.

    Args:
        cap: The most rows it keeps; the oldest are dropped first; 0 keeps all.
    """

    def __init__(self, cap: int = 0, device: str = "cpu") -> None:
        self.columns: dict[str, Tensor] = {}
        self._cap = cap
        self._device = device
        self._unsaved = 0

    def __len__(self) -> int:
        return next((len(column) for column in self.columns.values()), 0)

    def add(self, **rows: Tensor) -> None:
        """Append rows, for example ``images=uint8 [N, ch, H, W], labels=[N]``; the columns are those of the first call.

        Raises:
            ValueError: The columns differ from the first call's, or their lengths differ.
        """
        if len({len(part) for part in rows.values()}) != 1 or (self.columns and rows.keys() != self.columns.keys()):
            raise ValueError(f"rows of {sorted(rows)} do not fit a pool of {sorted(self.columns)}")
        for name, part in rows.items():
            part = part.detach().to(self._device).contiguous()
            column = torch.cat([self.columns[name], part]) if name in self.columns else part.clone()
            self.columns[name] = column[-self._cap :].clone() if 0 < self._cap < len(column) else column
        self._unsaved = min(len(self), self._unsaved + len(next(iter(rows.values()))))

    def unsaved(self) -> dict[str, Tensor]:
        """Return copies on the CPU of the rows added since the last :meth:`mark_saved`."""
        first = len(self) - self._unsaved
        return {name: column[first:].cpu().clone() for name, column in self.columns.items()}

    def mark_saved(self) -> None:
        """Mark all rows as saved."""
        self._unsaved = 0

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Fill an empty pool with all rows that were ever saved; the oldest beyond the cap are dropped."""
        if rows:
            self.add(**rows)
        self.mark_saved()


def batch_count(count: int, size: int, *, most: int = 0) -> int:
    """Return the number of batches that :func:`shuffled_batches` makes of ``count`` rows."""
    whole, rest = divmod(count, size)
    batches = max(1, whole + (rest > 1 or (rest == 1 and not whole)))
    return min(batches, most) if most else batches


def shuffled_batches(
    columns: Mapping[str, Tensor], size: int, rng: torch.Generator, *, most: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Pass once over a table in a random order.

    The last, partial batch is kept; a last batch of a single row joins the one before it, because batch
    normalisation cannot be trained on one sample.

    Args:
        columns: Equally long columns [N, ...].
        size: Rows of a batch, B.
        rng: A CPU generator.
        most: The most batches to yield; 0 yields all.

    Yields:
        The same columns [B, ...].
    """
    for rows, _ in shuffled_groups(columns, size, rng, most=most, together=1):
        yield rows


def shuffled_groups(
    columns: Mapping[str, Tensor], size: int, rng: torch.Generator, *, most: int = 0, together: int
) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
    """Pass over a table as :func:`shuffled_batches`, some batches at a time.

    Args:
        columns: Equally long columns [N, ...].
        size: Rows of a batch, B.
        rng: A CPU generator.
        most: The most batches in all; 0: all.
        together: Batches that are read at once, k.

    Yields:
        The same columns of the next k batches [k B, ...], and the number of rows of each batch.
    """
    count = len(next(iter(columns.values())))
    order = torch.randperm(count, generator=rng)
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    bounds = [*starts, count][: most + 1 if most else None]
    orders = {device: order.to(device) for device in {column.device for column in columns.values()}}
    for first in range(0, len(bounds) - 1, together):
        group = bounds[first : first + together + 1]
        rows = {name: column[orders[column.device][group[0] : group[-1]]] for name, column in columns.items()}
        yield rows, [end - start for start, end in pairwise(group)]


def quantize(pixels: Tensor) -> Tensor:
    """Return pixels in [0, 1] as 8-bit integers, ``floor(255 x)``; values outside are clamped."""
    return (pixels.detach().clamp(0, 1) * 255).to(torch.uint8)
