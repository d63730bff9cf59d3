"""A result's facts about differential privacy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_app.privacy import PrivacyConfig


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
