"""The label counts that a client sends to the server."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from fl_app.node_policy import FREE, NodePolicy
from strategies.core import refusals

if TYPE_CHECKING:
    from fl_app.config import ClientConfig

PRESENT = 1 / 5  # of an equal share: with ten classes, 2 % of the examples


def reported_counts(counts: tuple[int, ...], config: ClientConfig, policy: NodePolicy = FREE) -> tuple[int, ...] | None:
    """Return the label counts that a client reports; None if it reports none.

    Args:
        counts: Its examples per class [C].
        config: ``share_label_counts`` and ``label_counts_as``.
        policy: The most that the node reports; nothing with a privacy budget, because the counts carry no noise.

    Returns:
        Integers [C] with the sum of ``counts``.
    """
    if not reports_counts(config, policy):
        return None
    return equal_parts(counts) if "presence" in (config.label_counts_as, policy.label_counts) else counts


def reports_counts(config: ClientConfig, policy: NodePolicy) -> bool:
    """Say whether a client reports label counts at all."""
    return config.share_label_counts and policy.tells_counts


def check_shares_counts(config: ClientConfig, policy: NodePolicy, *, what: str) -> None:
    """Refuse an upload that holds exact label counts where the client does not report them as numbers.

    Raises:
        UploadError: It says what the upload is.
    """
    if not (config.share_label_counts and policy.tells_numbers) or config.label_counts_as == "presence":
        raise refusals.counts_not_shared(what)


def equal_parts(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the examples divided equally over the present classes; the remainder goes to the first of them.

    A class is present if it has more than :data:`PRESENT` times an equal share of the examples.
    """
    total = sum(counts)
    present = [count > PRESENT * total / len(counts) for count in counts]
    each, over = divmod(total, max(1, sum(present)))
    before = accumulate(present, initial=0)
    return tuple(there * (each + (earlier < over)) for there, earlier in zip(present, before, strict=False))
