"""The setting of a result in one line, for titles: data, split, clients and seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


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
