"""Points that harmful sums of features cost a ridge head, without and with the gatekeeper and the cap on a share.

    python tests/bench/feature_attacks.py --root DATA --cache FOLDER --out docs/results/feature_attacks.json

One client of ten is harmful. The penalty is fixed, so that a row shows the attack alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from feature_rivals import rounded
from features import Labelled, accuracy, classes_of, extracted, parser_of
from measure import say
from torch import Tensor

from fl_app.data import PartitionSpec, partition
from strategies.core.facts import UploadFacts
from strategies.gatekeeper.sums import inspect_sums
from strategies.method import Silent, Upload
from strategies.statistics.heads import Ridge
from strategies.statistics.sums import Statistics, projection, to_arrays
from strategies.statistics.uploaded import capped

COUNT, PENALTY, SHARE = 10, 0.1, 0.2
Cohort = dict[str, Statistics]


def divided(train: Labelled, alpha: float, seed: int) -> dict[str, Labelled]:
    """Return the examples of ten clients."""
    spec = PartitionSpec(law="dirichlet-classes", alpha=alpha)
    parts = partition(train[1].numpy(), spec, num_clients=COUNT, num_classes=classes_of(train[1]), seed=seed)
    return {f"c{k}": (train[0][part], train[1][part]) for k, part in enumerate(map(torch.from_numpy, parts))}


def harmful(parts: Mapping[str, Labelled], name: str) -> dict[str, Statistics]:
    """Return what the first of the clients sends under each attack."""
    (rows, labels), classes = parts[name], max(classes_of(own) for _, own in parts.values())
    rng = torch.Generator().manual_seed(0)
    shifted = rounded((rows, (labels + 1) % classes), classes)
    noise = F.normalize(torch.randn(rows.shape, generator=rng).abs())
    return {
        "none": rounded((rows, labels), classes),
        "flipped labels": shifted,
        "random labels": rounded((rows, torch.randint(classes, labels.shape, generator=rng)), classes),
        "random features": rounded((noise, labels), classes),
        "features in reverse order": rounded((rows.flip(1), labels), classes),
        "copy of another client": rounded(parts["c1"], classes),
        "flipped, claimed times 10": shifted.scaled(10.0),
        "flipped, claimed times 100": shifted.scaled(100.0),
        "honest, claimed times 100": rounded((rows, labels), classes).scaled(100.0),
    }


def judged(cohort: Cohort) -> tuple[str, ...]:
    """Return the suspects among sums."""

    def arrays(own: Statistics) -> dict[str, Tensor]:
        return to_arrays(own)

    uploads = [
        Upload(UploadFacts(name, "statistics", max(1, round(own.examples)), None), partial(arrays, own))
        for name, own in cohort.items()
    ]
    return inspect_sums(uploads, list(cohort)[1:] + list(cohort)[:1], Silent()).suspects


def score(cohort: Cohort, test: Labelled, share: float = 0.0) -> float:
    """Return the accuracy in % of a ridge head of a cohort, with a cap on each client's share."""
    factors = capped({name: own.examples for name, own in cohort.items()}, share) if share else {}
    total = Statistics.total(own.scaled(factors.get(name, 1.0)) for name, own in cohort.items())
    return accuracy(Ridge(total).head(PENALTY), test)


def rows(train: Labelled, test: Labelled, alpha: float, seed: int) -> list[dict[str, Any]]:
    """Return a row per attack on one division."""
    parts, found = divided(train, alpha, seed), []
    honest = {name: rounded(part, classes_of(train[1])) for name, part in parts.items()}
    for attack, sent in harmful(parts, "c0").items():
        cohort = {**honest, "c0": sent}
        suspects = judged(cohort)
        left = {name: own for name, own in cohort.items() if name not in suspects}
        found.append(
            {"alpha": alpha, "seed": seed, "attack": attack, "suspects": list(suspects), "none": score(cohort, test),
             "gatekeeper": score(left, test), "cap": score(cohort, test, SHARE), "both": score(left, test, SHARE)}
        )  # fmt: skip
        say(str(found[-1]))
    return found


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, test = (extracted(arguments, half) for half in ("train", "test"))
    basis = projection(train[0].shape[1], arguments.dim, 0).float()
    train, test = ((F.normalize(features @ basis), labels) for features, labels in (train, test))
    found = {
        "data": arguments.data, "features": arguments.dim, "train": len(train[1]), "test": len(test[1]),
        "share": SHARE, "penalty": PENALTY, "torch": torch.__version__,
        "rows": [row for alpha in (0.1, 0.5, 100.0) for seed in range(3) for row in rows(train, test, alpha, seed)],
    }  # fmt: skip
    Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=512)
    main(parser.parse_args())
