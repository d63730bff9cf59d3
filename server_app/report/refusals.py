"""Refused clients with their reasons, each reason once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def refusal_lines(refusals: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line per reason: ``node-3, node-7: no answer within 5 s``.

    Args:
        refusals: Entries with ``client`` and ``reason``, as in result.json.
    """
    clients: dict[str, list[str]] = {}
    for entry in refusals:
        clients.setdefault(entry["reason"], []).append(entry["client"])
    return [f"{', '.join(dict.fromkeys(named))}: {reason}" for reason, named in clients.items()]
