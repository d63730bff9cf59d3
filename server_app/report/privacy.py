"""What the server does about differential privacy: it refuses what cannot be kept, and says what was promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fl_app.privacy import PrivacyConfig, check_architecture
from strategies.core.errors import OptionError
from strategies.method import METHODS, Need
from strategies.uploads.kinds import CLASSIFIER

if TYPE_CHECKING:
    from fl_app.data import Split
    from server_app.settings.build import Settings


def check_privacy(settings: Settings) -> None:
    """Refuse a method that asks clients for more than one private upload of a classifier.

    Raises:
        OptionError: Names the setting, its value and what is allowed.
    """
    if not settings.app.privacy.on:
        return
    method, rounds = settings.method, int(getattr(settings.method_config, "rounds", 1))
    if not _asks_once(settings.method.name):
        allowed = ", ".join(name for name in METHODS if _asks_once(name))
        raise OptionError(
            f"setting 'method' is {method.name!r}: allowed with 'privacy.epsilon' are methods that ask a client for "
            f"one classifier and nothing after it: {allowed}"
        )
    if rounds > 1:
        raise OptionError(
            f"setting '{method.name}.rounds' is {rounds}: allowed with 'privacy.epsilon' is 1; every round would spend "
            "the budget anew"
        )


def check_private_models(settings: Settings, split: Split) -> None:
    """Refuse clients' architectures that cannot be trained privately.

    Raises:
        OptionError: Names the first, and those that fit.
    """
    if settings.app.privacy.on:
        for name in dict.fromkeys(settings.app.model.mix()):
            check_architecture(name, split.num_classes, split.input_shape)


def privacy_facts(privacy: PrivacyConfig) -> dict[str, Any]:
    """Return what a result says of the clients' privacy; empty without any.

    Returns:
        ``epsilon``, at most, and ``delta`` of each client's upload; ``clip``; ``described``.
    """
    if not privacy.on:
        return {}
    facts = {"epsilon": privacy.epsilon, "delta": privacy.delta, "clip": privacy.clip}
    return {**facts, "described": privacy.described()}


def privacy_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a result about privacy.

    Args:
        facts: See :func:`privacy_facts`; may be empty.
    """
    return [f"privacy: {facts['described']}"] if facts else []


def _asks_once(name: str) -> bool:
    method = METHODS[name]
    once = method.uploads == CLASSIFIER and method.fit_with is None
    return once and not {Need.CLIENTS, Need.LABEL_COUNTS} & method.needs
