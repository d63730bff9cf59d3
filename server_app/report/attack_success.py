"""A result's facts about simulated attackers, and the success of a backdoor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fl_app.attacks import KINDS, AttackConfig, triggered
from fl_app.data import ImageData
from strategies.combiners.outcomes import load_model

if TYPE_CHECKING:
    from server_app.settings.held_out import HeldOut
    from strategies.run.stage import StageReport


def attack_line(attack: AttackConfig) -> str:
    """Return the warning about simulated attackers, in one line; empty without them."""
    return f"attackers are simulated: {attack.described()} ({KINDS[attack.kind]})" if attack.kind != "none" else ""


def attack_facts(attack: AttackConfig, report: StageReport, held_out: HeldOut) -> dict[str, Any]:
    """Return a result's facts about simulated attackers; empty without them.

    Args:
        attack: The attackers and the kind of their attack.
        report: The finished server stage.
        held_out: The held-out images, used for no training and no choice.

    Returns:
        ``kind``, ``clients``, ``described``; for a backdoor also ``images`` and ``success``. ``images`` counts the
        held-out images of other classes than the target, with the trigger. ``success`` is the share of them, in %, that
        the result puts into the target class.
    """
    if attack.kind == "none":
        return {}
    facts: dict[str, Any] = {"kind": attack.kind, "clients": list(attack.names()), "described": attack.described()}
    if attack.kind != "backdoor":
        return facts
    model = load_model(report.outcome, report.job)
    return {**facts, "target": attack.target, **backdoor_success(model, held_out, attack.target)}


def backdoor_success(model: nn.Module, held_out: HeldOut, target: int) -> dict[str, Any]:
    """Return the success of a backdoor.

    Args:
        model: Maps normalised images [B, ch, H, W] to logits; its mode is restored.
        held_out: Images without the trigger.
        target: The class to which the trigger shall lead.

    Returns:
        ``success``, in % of ``images``, the number of tested images; success is None without images.
    """
    others = held_out.data.labels != target
    marked = triggered(held_out.data.images[others])
    count = len(marked)
    if not count:
        return {"success": None, "images": 0}
    # The accuracy with the target as every image's label.
    aimed = replace(held_out, data=ImageData(marked, torch.full((count,), target)), passed=None)
    return {"success": aimed.accuracy(model), "images": count}


def attack_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a result's lines about attackers: their names, and a backdoor's success.

    Args:
        facts: See :func:`attack_facts`; may be empty.
    """
    if not facts:
        return []
    line = f"attackers are simulated: {facts['described']}"
    if facts.get("success") is None:
        return [line]
    return [
        f"{line}; attack success {facts['success']:.2f} % (of {facts['images']} held-out images of other classes, with "
        f"the trigger, the share that the result puts into class {facts['target']})"
    ]
