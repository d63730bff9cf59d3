"""What a client's crafted update costs Tally's gate: ``python tests/bench/gate_attacks.py --dir FOLDER --root DATA``.

One client of ten attacks. It trains on flipped labels, and then lays its update of the gated layer across images. For
that it projects the update onto the directions in which the layer's inputs are largest, and adds a trace of each. Its
model answers much as before, and the gate takes every such image for one of its own. The images are Tally's noise, or
held-out ones of the half that does not score. The last attack avoids the directions of noise, for a gate that compares
an image with noise. ``--write`` renews the table of docs/tally.md.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from feature_tables import written
from federations import Federation, trained
from measure import say, stored
from rivals import spread
from torch import Tensor
from two_classes import DATA, LAWS, PAGE, SEEDS, Rule, gate, pooled

from strategies.client.parameters import State
from strategies.combiners.feature_noise import noise_for
from strategies.combiners.tally_pool import TallyPoolOptions
from strategies.combiners.update_gate import SHARE, lower_part, start_model
from strategies.core.seeds import generator
from strategies.method import Upload
from strategies.run.files import write_json
from strategies.teacher.augment import Standardize

OUT = PAGE.parent / "results" / "gate_attacks.json"
DIVISIONS = ("two classes, 10 clients", "alpha 0.1")
ATTACKER = "client-000"
TRACE = 0.01  # of the update's norm, in each direction
FLIPPED = f" attack.kind=label-flip attack.clients={ATTACKER}"


def on_noise(found: Federation, logs: Callable[[Tensor], Tensor]) -> Tensor:
    """Return each client's mean log density [M, 1] on noise."""
    return logs(probes(found)).mean(1, keepdim=True)


RULES: dict[str, Rule] = {
    "Tally, counts read off": pooled(told=False),
    "gated by updates": gate(told=False, calibrated=True),
    "gated by updates, not calibrated": gate(told=False, calibrated=False),
    "gated by updates, relative to noise": gate(told=False, calibrated=True, offsets=on_noise),
}
# Attack -> the images that the attacker lays its update across, and the weight of noise, from which it turns away.
ATTACKS: dict[str, tuple[Callable[[Federation], Tensor], float] | None] = {
    "none": None,
    "flipped labels": None,
    "flipped labels, update across noise": (lambda found: probes(found), 0.0),
    "flipped labels, update across real images": (lambda found: found.half("selection")[0], 0.0),
    "flipped labels, across real images, away from noise": (lambda found: found.half("selection")[0], 0.1),
}


def probes(found: Federation) -> Tensor:
    """Return noise images as Tally draws them, by a seed that is not the run's."""
    batches = noise_for(found.job, TallyPoolOptions().probes, generator(found.job.seed + 1, "attack"))
    return torch.cat([Standardize(found.job.normalization)(batch) for batch in batches])


def attacked(folder: Path, text: str, clients: int, attack: str) -> Federation:
    """Return the clients of a division, of whom the first attacks."""
    honest = folder / "honest"
    found = trained(honest, text, clients)
    if attack == "none":
        return found
    flipped = folder / "flipped"
    if not flipped.exists():
        shutil.copytree(honest, flipped, ignore=shutil.ignore_patterns(f"{ATTACKER}.*"))
    found = trained(flipped, text + FLIPPED, clients)
    crafts = ATTACKS[attack]
    if crafts is None:
        return found
    first, *others = found.job.uploads
    state = crafted(found, first.read(), crafts[0](found), away=crafts[1])
    return found.with_uploads([Upload(first.facts, lambda: state), *others])


def crafted(found: Federation, state: State, images: Tensor, *, away: float) -> State:
    """Return an upload whose update of the gated layer has rows that span the images' inputs of that layer.

    Args:
        found: The division.
        state: The upload without the craft.
        images: Normalised images [N, ch, H, W].
        away: Weight of Tally's noise, whose directions the update avoids.
    """
    model = start_model(found.job)
    name, below = lower_part(model)
    assert below is not None  # the architecture has a gate

    def second_moment(images: Tensor) -> Tensor:
        with torch.no_grad():
            inputs = torch.cat([below(part) for part in torch.split(images, 500)]).double()
        inputs = inputs / inputs.norm(dim=1, keepdim=True).clamp_min(1e-12)  # the gate asks for a share of their size
        return inputs.T @ inputs / len(inputs)

    wanted = second_moment(images) - away * second_moment(probes(found))
    start = model.state_dict()[f"{name}.weight"].double()
    update = state[f"{name}.weight"].double() - start
    most = min(len(update), int(SHARE * update.shape[1]))
    spanned = torch.linalg.eigh(wanted)[1][:, -most:].T
    rotation = torch.linalg.qr(torch.randn(len(update), most, generator=generator(0, "attack")).double())[0]
    laid = update @ spanned.T @ spanned + TRACE * update.norm() * rotation @ spanned
    return {**state, f"{name}.weight": (start + laid).float()}


def measured(folder: Path, root: str, rows: list[dict[str, Any]], out: Path) -> None:
    """Score every rule that has no row yet, and write the rows after each division."""
    known = {(row["data"], row["law"], row["seed"], row["attack"], row["rule"]) for row in rows}
    for law, data, seed, attack in ((*place, attack) for place in places() for attack in ATTACKS):
        missing = [rule for rule in RULES if (data, law, seed, attack, rule) not in known]
        if not missing:
            continue
        division, clients = LAWS[law]
        text = f"{DATA[data]}{division} client.epochs=20 seed={seed} threads=1 data.root={root}"
        cell = folder / f"{data}-{law}-{seed}".replace(" ", "-").replace(",", "")
        found = attacked(cell, text, clients, attack)
        images, labels = found.half("report")
        logits = found.logits(images)
        for rule in missing:
            right = (RULES[rule](found, images, logits).argmax(1) == labels).double().mean()
            row = {"data": data, "law": law, "seed": seed, "attack": attack, "rule": rule}
            rows.append({**row, "accuracy": round(100 * float(right), 2)})
            say(f"{data}, {law}, seed {seed}, {attack}: {rule} {rows[-1]['accuracy']:.1f}")
        write_json(out, {"rows": rows})


def places() -> list[tuple[str, str, int]]:
    """Return the divisions, data sets and seeds."""
    return [(law, data, seed) for law in DIVISIONS for data in DATA for seed in SEEDS]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a row for each rule under each attack."""
    heads = [(data, law) for data in DATA for law in DIVISIONS]
    lines = [f"| attack | | {' | '.join(f'{data}, {law}' for data, law in heads)} |"]
    lines.append("|---|---|" + "---:|" * len(heads))
    for attack in ATTACKS:
        for rule in RULES:
            cells = []
            for data, law in heads:
                place = {"data": data, "law": law, "attack": attack, "rule": rule}
                own = [row["accuracy"] for row in rows if place.items() <= row.items()]
                cells.append(spread(pd.Series(own, dtype=float)))
            lines.append(f"| {attack} | {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, default=Path("gate-attacks"))
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write", action="store_true", help="renew the page's table from the results")
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows = stored(words.out)
    if words.write:
        PAGE.write_text(written(PAGE.read_text(), "gate_attacks", table(rows)))
    else:
        measured(words.dir, words.root, rows, words.out)


if __name__ == "__main__":
    main()
