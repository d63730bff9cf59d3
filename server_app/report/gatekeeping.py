"""The gatekeeper's verdict in the result, the model card and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fl_app.attacks import KINDS, AttackConfig, triggered
from fl_app.data import ImageData
from server_app.report.drawing import new_figure, short
from server_app.report.tables import Table
from strategies.combiners.outcomes import load_model
from strategies.core.stage_options import EXCLUDE
from strategies.gatekeeper.verdicts import MEASURES, SUSPECT, Inspection
from strategies.run.quarantine import load_verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from server_app.settings.server_data import HeldOut
    from strategies.run.round_folder import RoundFolder
    from strategies.run.stage import StageReport


FARTHEST = 8.0  # robust deviations; beyond, the heat map's colour stays the same


def verdict_facts(folder: RoundFolder) -> dict[str, Any]:
    """Return the entry ``gatekeeper`` of result.json, the verdict on a round; empty without one.

    Raises:
        StoreError: The file is damaged.
    """
    kept = load_verdict(folder)
    if kept is None:
        return {}
    return {"gatekeeper": {key: value for key, value in kept.items() if key != "uploads"}}


def verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    """Return the verdict in a few lines: the suspects with reasons, the action taken, and the skipped tests."""
    if not verdict:
        return []
    done = "quarantined" if verdict["policy"] == EXCLUDE else "suspect"
    inspection = Inspection.from_json(verdict)
    lines = [f"gatekeeper: {row.client} is {done}, {row.reason}" for row in inspection.rows if row.findings]
    lines += [f"gatekeeper: {note}" for note in inspection.notes]
    return lines or [f"gatekeeper: no upload of {len(inspection.rows)} looks harmful"]


def verdict_table(verdict: Mapping[str, Any]) -> list[Table]:
    """Return the table of the verdicts; none where the gatekeeper did not judge."""
    if not verdict:
        return []
    inspection = Inspection.from_json(verdict)
    rows = [(row.client, row.verdict, row.reason or "-") for row in inspection.rows]
    suspects = frozenset(place for place, row in enumerate(inspection.rows) if row.verdict == SUSPECT)
    done = "left out" if verdict["policy"] == EXCLUDE else "took part"
    notes = [
        "Every upload was compared with the others before the server stage.",
        f"Suspects {done}." if suspects else "No upload looks harmful.",
        "An upload that looks harmless may still harm.",
        *(f"{note[0].upper()}{note[1:]}." for note in inspection.notes),
    ]
    return [Table("Gatekeeper", ("client", "verdict", "why"), rows, texts=3, strong=suspects, notes=notes)]


def plot_verdict(verdict: Mapping[str, Any]) -> Figure | None:
    """Draw a heat map of clients by measures: value, distance from the others, verdict; None without measurements."""
    if not verdict:
        return None
    inspection = Inspection.from_json(verdict)
    shown = [name for name in MEASURES if any(_known(row.measures, name) for row in inspection.rows)]
    if not shown:
        return None
    rows = inspection.rows
    scores = np.array([[row.scores.get(name, math.nan) for name in shown] for row in rows])
    high = min(0.5, max(0.16, 16.0 / len(rows)))
    figure, axes = new_figure(2.6 + 0.85 * len(shown), 1.6 + high * len(rows))
    image = axes.imshow(scores, cmap="coolwarm", vmin=-FARTHEST, vmax=FARTHEST, aspect="auto")
    points = min(9.0, 0.6 * 72 * high)
    for place, row in enumerate(rows):
        for column, name in enumerate(shown):
            if _known(row.measures, name):
                far = abs(scores[place, column]) > 0.6 * FARTHEST
                text = f"{row.measures[name]:.2g}"
                axes.text(
                    column, place, text, ha="center", va="center", fontsize=points, color="white" if far else "black"
                )
    axes.set_xticks(range(len(shown)), [MEASURES[name] for name in shown])
    names = [f"{short(row.client)}{f'  {row.harm}' if row.findings else ''}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=min(10.0, points + 1))
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row.verdict == SUSPECT:
            label.set_color("#b40426")
            label.set_fontweight("bold")
    figure.colorbar(image, ax=axes, label="robust deviations from the others", aspect=30)
    axes.set_title("The gatekeeper's measurements")
    return figure


def _known(values: Mapping[str, float], name: str) -> bool:
    return not math.isnan(values.get(name, math.nan))


def attack_line(attack: AttackConfig) -> str:
    """Return the warning about simulated attackers, in one line; empty without them."""
    return f"attackers are simulated: {attack.described()} ({KINDS[attack.kind]})" if attack.kind != "none" else ""


def attack_facts(attack: AttackConfig, report: StageReport, held_out: HeldOut) -> dict[str, Any]:
    """Return a result's facts about simulated attackers; empty without them.

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
    """Return a result's lines about attackers: their names, and a backdoor's success."""
    if not facts:
        return []
    line = f"attackers are simulated: {facts['described']}"
    if facts.get("success") is None:
        return [line]
    return [
        f"{line}; attack success {facts['success']:.2f} % (of {facts['images']} held-out images of other classes, with "
        f"the trigger, the share that the result puts into class {facts['target']})"
    ]
