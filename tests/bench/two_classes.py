"""What a silent server, and numbers that clients tell, are worth where each client has few classes.

    python tests/bench/two_classes.py --dir FOLDER --root DATA --out docs/results/two_classes.json

Trains the clients that FOLDER lacks, each without a tenth of its examples, and scores every rule on the half of the
held-out images that reports. The last group of rules is fitted to the other half, with its labels. ``--write`` renews
the tables of docs/tally.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from feature_tables import written
from federations import Federation, trained
from measure import say, stored
from rivals import spread
from torch import Tensor
from torch.nn import functional

from strategies.combiners.combiners import LabelCount, Mean, MeanProbability
from strategies.combiners.opinion_pools import centred, class_shares
from strategies.combiners.update_gate import GatedPool, gated_pool
from strategies.core.seeds import generator
from strategies.run.files import write_json

SEEDS = (100, 101, 102)
DATA = {"digits": "", "Fashion-MNIST": "data.name=fashion-mnist data.limit=20000 client.batch-size=128 "}
LAWS = {
    "two classes, 10 clients": ("data.law=classes data.classes-per-client=2", 10),
    "two classes, 5 clients": ("data.law=classes-p1 data.classes-per-client=2", 5),
    "alpha 0.05": ("data.alpha=0.05", 10),
    "alpha 0.1": ("data.alpha=0.1", 10),
    "alpha 0.3": ("data.alpha=0.3", 10),
    "alpha 1": ("data.alpha=1", 10),
}
EPSILON, BOUND = 1.0, 10.0  # of the Laplace noise on told numbers; largest told logit
STEPS, RATE = 400, 0.03  # of Adam, where a rule is fitted
PAGE = Path(__file__).parents[2] / "docs" / "tally.md"
OUT = PAGE.parent / "results" / "two_classes.json"


Rule = Callable[[Federation, Tensor, Tensor], Tensor]  # (clients, images, members' logits) -> logits
# (clients, log densities of images) -> the means [M, 1] to which densities are relative
Offsets = Callable[[Federation, Callable[[Tensor], Tensor]], Tensor]


class Shifted(GatedPool):
    """A gated pool whose densities are relative to ``own`` [M, 1], their means on some images."""

    own: Tensor

    def densities(self, x: Tensor) -> Tensor:
        """Return log d_k(x) [M, B], at most 0."""
        logs = self.logs(x) - self.own
        return logs - logs.amax(0, keepdim=True)

    @classmethod
    def of(cls, pool: GatedPool, offsets: Offsets, found: Federation) -> Shifted:
        """Return a gated pool with offsets."""
        shifted = cls(pool, pool.bases, pool.power, pool.below)
        with torch.no_grad():
            shifted.own = offsets(found, shifted.logs)
        return shifted

    def logs(self, x: Tensor) -> Tensor:
        """Return the log densities [M, B], relative to nothing."""
        return -self.power * self.outside(x).log()


def on_kept(found: Federation, logs: Callable[[Tensor], Tensor]) -> Tensor:
    """Return each client's mean log density [M, 1] on the images that it keeps."""
    return torch.stack([logs(kept)[k].mean() for k, (kept, _) in enumerate(found.kept)])[:, None]


def gate(*, told: bool, calibrated: bool, offsets: Offsets | None = None) -> Rule:
    """Return Tally's pool with the gate of updates, its log densities less the offsets [M, 1]."""

    def rule(found: Federation, images: Tensor, logits: Tensor) -> Tensor:
        pool = gated_pool(found.job, found.pool(found.told if told else found.read_off, calibrated=calibrated))
        if not isinstance(pool, GatedPool):
            raise TypeError(pool)
        if offsets is not None:
            pool = Shifted.of(pool, offsets, found)
        parts = zip(torch.split(logits, 500, dim=1), torch.split(images, 500), strict=True)
        with torch.no_grad():
            return torch.cat([pool(seen, part) for seen, part in parts])

    return rule


def pooled(told: bool, calibrated: bool = True) -> Rule:
    """Return Tally's pool."""
    return lambda found, _, logits: found.pool(found.told if told else found.read_off, calibrated=calibrated)(logits)


def noisy_counts(found: Federation, _: Tensor, logits: Tensor) -> Tensor:
    """Return Tally's pool of counts with Laplace noise: one example changes one of them by 1."""
    counts = (found.told + laplace(found.told.shape, 1 / EPSILON, found.job.seed)).clamp_min(0)
    return found.pool(counts)(logits)


def by_mean_logits(noise: bool) -> Rule:
    """Return the label-count ensemble of logits divided by each client's told mean logit of each class."""

    def rule(found: Federation, _: Tensor, logits: Tensor) -> Tensor:
        scale = torch.ones_like(found.told)
        drawn = laplace(scale.shape, BOUND / EPSILON, found.job.seed) if noise else torch.zeros_like(scale)
        for k, (images, labels) in enumerate(found.kept):
            own = centred(found.logits(images))[k].clamp(-BOUND, BOUND)
            for label in labels.unique().tolist():
                chosen = own[labels == label, label]
                scale[k, label] = (chosen.sum() + drawn[k, label]) / len(chosen)
        # A client that does not know a class would have a large weight for it: the median bounds the others from below.
        scale = scale.clamp_min(float(scale[found.told > 0].median()))
        return LabelCount(found.told)(centred(logits) / scale[:, None])

    return rule


def laplace(shape: torch.Size, scale: float, seed: int) -> Tensor:
    """Return Laplace noise of a scale."""
    uniform = torch.rand(shape, generator=generator(seed, "laplace")) - 0.5
    return -scale * uniform.sign() * torch.log1p(-2 * uniform.abs())


def fitted(what: str, *, kept: bool = False) -> Rule:
    """Return the label-count ensemble with parameters fitted to labelled images: of the server, or the clients' kept.

    Args:
        what: ``"bias"`` per class; ``"scale"`` per client and that; ``"weight"`` per client and class and that.
        kept: Whether the images are those that clients keep, as in FENS' rounds.
    """

    def rule(found: Federation, _: Tensor, logits: Tensor) -> Tensor:
        if kept:
            images, labels = (torch.cat(parts) for parts in zip(*found.kept, strict=True))
        else:
            images, labels = found.half("selection")
        seen = centred(found.logits(images))
        size = seen.std((1, 2), keepdim=True) / 3
        weight, bias = class_shares(found.told).requires_grad_(), torch.zeros(found.told.shape[1], requires_grad=True)
        scale = torch.zeros(len(seen), 1, requires_grad=True)
        free = {"bias": [bias], "scale": [bias, scale], "weight": [bias, weight]}[what]
        optimizer = torch.optim.Adam(free, RATE)
        for _step in range(STEPS):
            optimizer.zero_grad()
            made = torch.einsum("mc,mbc->bc", weight * scale.exp(), seen / size) + bias
            functional.cross_entropy(made, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return torch.einsum("mc,mbc->bc", weight * scale.exp(), centred(logits) / size).detach() + bias.detach()

    return rule


GROUPS: Mapping[str, Mapping[str, Rule]] = {
    "weights alone": {
        "FedENS": lambda _f, _x, logits: Mean()(logits),
        "mean of probabilities": lambda _f, _x, logits: MeanProbability()(logits),
        "Tally, counts read off": pooled(told=False),
        "the same, not calibrated": pooled(told=False, calibrated=False),
        "**and gated by updates**": gate(told=False, calibrated=True),
        "**and gated by updates, not calibrated**": gate(told=False, calibrated=False),
    },
    "clients tell numbers": {
        "label-count ensemble": lambda found, _, logits: LabelCount(found.told)(logits),
        "Tally, label counts": pooled(told=True),
        "label counts with Laplace noise, epsilon 1": noisy_counts,
        "logits by told mean logits": by_mean_logits(noise=False),
        "mean logits with Laplace noise, epsilon 1": by_mean_logits(noise=True),
        "gated by updates, label counts, not calibrated": gate(told=True, calibrated=False),
        "gated, and told mean densities": gate(told=True, calibrated=False, offsets=on_kept),
    },
    "fitted to labelled images": {
        "a bias per class": fitted("bias"),
        "a scale per client and that": fitted("scale"),
        "a weight per client and class and that": fitted("weight"),
        "that weight, fitted to what clients keep": fitted("weight", kept=True),
    },
}


FEW = [law for law in LAWS if law.startswith("two classes")]
EVERY = [(group, rule) for group, rules in GROUPS.items() for rule in rules]
# The rules that the other laws are scored by.
GATED = [
    ("weights alone", rule)
    for rule in (
        "Tally, counts read off",
        "the same, not calibrated",
        "**and gated by updates**",
        "**and gated by updates, not calibrated**",
    )
]


def measured(folder: Path, root: str, have: list[dict[str, Any]], out: Path, wanted: list[str]) -> None:
    """Score every rule that has no row yet on its divisions, and write the rows after each division."""
    known = {(one["data"], one["law"], one["seed"], one["rule"]) for one in have}
    for law, data, seed in ((law, data, seed) for law in LAWS for data in DATA for seed in SEEDS):
        pairs = EVERY if law in FEW else GATED
        missing = [(group, rule) for group, rule in pairs if (data, law, seed, rule) not in known]
        if not missing or (wanted and not any(word in f"{data} {law} {seed}" for word in wanted)):
            continue
        division, clients = LAWS[law]
        text = f"{DATA[data]}{division} client.epochs=20 seed={seed} threads=1 data.root={root}"
        found = trained(folder / f"{data}-{law}-{seed}".replace(" ", "-").replace(",", ""), text, clients)
        images, labels = found.half("report")
        logits = found.logits(images)
        for group, rule in missing:
            right = (GROUPS[group][rule](found, images, logits).argmax(1) == labels).double().mean()
            have.append({"data": data, "law": law, "seed": seed, "group": group, "rule": rule})
            have[-1]["accuracy"] = round(100 * float(right), 2)
            say(f"{data}, {law}, seed {seed}: {rule} {have[-1]['accuracy']:.1f}")
        write_json(out, {"rows": have})


def tables(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the tables of docs/tally.md: every rule with two classes per client, and the gate with more of them."""
    others = [law for law in LAWS if law not in FEW]
    return table(rows, FEW, EVERY), table(rows, others, GATED)


def table(rows: list[dict[str, Any]], laws: list[str], rules: list[tuple[str, str]]) -> str:
    """Return a table with a row for each rule, and for its group where that changes."""
    known = {(row["data"], row["law"]) for row in rows}
    heads = [head for head in ((data, law) for data in DATA for law in laws) if head in known]
    lines = [f"| | {' | '.join(f'{data}, {law}' for data, law in heads)} |", "|---|" + "---:|" * len(heads)]
    groups = [group for group, _ in rules]
    for place, (group, rule) in enumerate(rules):
        if len({*groups}) > 1 and group not in groups[:place]:
            lines.append(f"| *{group}* |" + " |" * len(heads))
        lines.append(f"| {rule} | {' | '.join(cell(rows, group, rule, *head) for head in heads)} |")
    return "\n".join(lines)


def cell(rows: list[dict[str, Any]], group: str, rule: str, data: str, law: str) -> str:
    """Return :func:`rivals.spread` over the seeds."""
    place = {"data": data, "law": law, "group": group, "rule": rule}
    return spread(pd.Series([row["accuracy"] for row in rows if place.items() <= row.items()], dtype=float))


def main() -> None:
    """Measure, or write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--dir", type=Path, default=Path("two-classes"))
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="*", default=[], help="words of the divisions to measure")
    parser.add_argument("--write", action="store_true", help="renew the page's tables from the results")
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows = stored(words.out)
    if not words.write:
        measured(words.dir, words.root, rows, words.out, words.only)
        return
    for name, new in zip(("few", "more"), tables(rows), strict=True):
        PAGE.write_text(written(PAGE.read_text(), f"two_classes:{name}", new))


if __name__ == "__main__":
    main()
