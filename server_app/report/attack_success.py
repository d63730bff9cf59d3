"""What a result says of simulated attackers, and how often a backdoor works."""

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
    """Return what everybody is to know of a run with attackers, in one line; empty without them."""
    return f"attackers are simulated: {attack.described()} ({KINDS[attack.kind]})" if attack.kind != "none" else ""


def attack_facts(attack: AttackConfig, report: StageReport, held_out: HeldOut) -> dict[str, Any]:
    """Return what a result says of simulated attackers; empty without them.

    Args:
        attack: Who did what.
        report: The finished server stage.
        held_out: The images nobody trained on or chose by.

    Returns:
        ``kind``, ``clients``, ``described``; of a backdoor also ``success``, the share in % of ``images``, held-out
        ones with the trigger that are not of the target class, which the result puts into it.
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
        target: The class that the trigger is to lead to.

    Returns:
        ``success``, in %, and ``images``, how many it is a share of; success is None if there are none.
    """
    others = held_out.data.labels != target
    marked = triggered(held_out.data.images[others])
    count = len(marked)
    if not count:
        return {"success": None, "images": 0}
    # The share that is "labelled rightly" where every right label is the target.
    aimed = replace(held_out, data=ImageData(marked, torch.full((count,), target)), passed=None)
    return {"success": aimed.accuracy(model), "images": count}


def attack_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a result about attackers: who they were, and a backdoor's success.

    Args:
        facts: See :func:`attack_facts`; may be empty.
    """
    if not facts:
        return []
    line = f"attackers are simulated: {facts['described']}"
    if facts.get("success") is None:
        return [line]
    return [
        f"{line}; attack success {facts['success']:.2f} % (of {facts['images']} held-out images with the trigger that "
        f"are not of class {facts['target']}, those put into it)"
    ]
