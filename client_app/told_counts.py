"""What a client tells of its examples per class."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_app.config import ClientConfig

PRESENT = 1 / 5  # of an equal share: with ten classes, 2 % of the examples


def told_counts(counts: tuple[int, ...], config: ClientConfig) -> tuple[int, ...] | None:
    """Return the label counts that a client sends; None if it tells none.

    Args:
        counts: Its examples per class [C].
        config: ``share_label_counts`` and ``label_counts_as``.

    Returns:
        Whole numbers [C] with the sum of ``counts``.
    """
    if not config.share_label_counts:
        return None
    return equal_parts(counts) if config.label_counts_as == "presence" else counts


def equal_parts(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the examples divided equally over the classes that are present; what is left over goes to the first.

    A class is present that has more than :data:`PRESENT` times an equal share of the examples.
    """
    total = sum(counts)
    present = [count > PRESENT * total / len(counts) for count in counts]
    each, over = divmod(total, max(1, sum(present)))
    return tuple(there * (each + (sum(present[:number]) < over)) for number, there in enumerate(present))
