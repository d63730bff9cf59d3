"""Tally and FENS on heads that clients train on the same features, beside the ensembles that train nothing.

    python tests/bench/feature_ensembles.py --root DATA --cache FOLDER --out docs/results/feature_ensembles.json

It continues a file that it has begun. The heads are those of ``feature_rivals.py``. FENS' clients keep a tenth of their
examples from training, and train its aggregator on them in rounds; its other settings are the app's.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from feature_gaussians import divided
from feature_rivals import trained
from features import ALPHAS, SEEDS, Labelled, classes_of, extracted, parser_of
from measure import say
from torch import Tensor, nn

from fl_app.data import HALVES, half_of
from server_app.settings.read import APP_DEFAULTS
from strategies.aggregation.steps import round_steps
from strategies.aggregation.training import Sgd
from strategies.combiners.aggregators import aggregator_for
from strategies.combiners.combiners import LabelCount, build_combiner
from strategies.combiners.voting import merged, vote_counts
from strategies.core.facts import Upload, UploadFacts
from strategies.core.options import parse
from strategies.core.seeds import derive_seed
from strategies.fens import FensConfig, fitted
from strategies.method import METHODS, Job, Normalization, Silent
from strategies.statistics.sums import projection

CLIENTS = (10, 100)
HEAD = "head+measured"


class OnFeatures(nn.Module):
    """A linear head in place of one on a backbone: its images are the features."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features.flatten(1))
        return logits

    def on_features(self) -> OnFeatures:
        return OnFeatures(self.head.in_features, self.head.out_features)


class Held:
    """The clients as trainers of FENS' aggregator, with the logits of their held examples [M, n, C]."""

    mib_per_client = 0.0

    def __init__(self, config: FensConfig, held: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], seed: int):
        self._config, self._held, self._seed = config, held, seed
        self.notes: list[str] = []

    def round(self, number: int, params: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
        config = self._config
        sgd, found = Sgd(config.local_steps, config.batch_size, config.client_lr), []
        for client, (logits, labels) in enumerate(self._held):
            seed = derive_seed(self._seed, "fens", client, number)
            name = aggregator_for(config.aggregator, logits.shape[2]).name
            none = np.zeros((len(labels), 0), np.float32)
            ends = round_steps(name, params, inputs=none, logits=logits, labels=labels, sgd=sgd, seed=seed)
            found.append((ends, sgd.seen(len(labels))))
        return found

    def votes(self) -> np.ndarray[Any, Any]:
        return merged(vote_counts(logits, labels) for logits, labels in self._held)


def uploads_of(parts: list[Labelled], classes: int) -> tuple[Upload, ...]:
    """Train every client's head."""
    found = []
    for k, (rows, labels) in enumerate(parts):
        head = trained((rows, labels), classes, k)
        state = {"head.weight": head.weight.float(), "head.bias": head.bias.float()}
        counts = tuple(torch.bincount(labels, minlength=classes).tolist())
        found.append(Upload(UploadFacts(f"client-{k:04d}", HEAD, len(labels), counts), lambda state=state: state))
    return tuple(found)


def logits_of(uploads: tuple[Upload, ...], rows: Tensor) -> Tensor:
    """Return the clients' logits [M, N, C] of features of norm 1 [N, d]."""
    states = [upload.read() for upload in uploads]
    return torch.stack([F.linear(rows, state["head.weight"], state["head.bias"]) for state in states])


def job_of(uploads: tuple[Upload, ...], config: Any, seed: int) -> Job:
    """Return the job of a method on heads; its images' shape is that of the features, which no method here makes."""
    classes, width = uploads[0].read()["head.weight"].shape
    space = Normalization((0.0,), (1.0,))
    builders = {HEAD: lambda: OnFeatures(width, classes)}
    return Job(uploads, builders, HEAD, classes, (1, 1, width), space, config, seed=seed)


def cell(train: Labelled, test: Labelled, clients: int, alpha: float, seed: int) -> dict[str, Any]:
    """Return one row: all ensembles on one division."""
    parts = [part for part in divided(train, clients, alpha, seed) if len(part[1]) > 1]
    uploads = uploads_of(parts, classes_of(train[1]))
    logits = logits_of(uploads, test[0])

    def right(scores: Tensor) -> float:
        return 100.0 * float((scores.argmax(1) == test[1]).double().mean())

    tally = METHODS["tally"].fit(job_of(uploads, METHODS["tally"].config(), seed), Silent())
    student, pool = tally.student or {}, tally.ensemble
    assert pool is not None
    return {
        "clients": clients, "alpha": alpha, "seed": seed, "holding": len(parts),
        "fedens": right(logits.softmax(2).mean(0)),
        "label_counts": right(LabelCount([upload.label_counts for upload in uploads])(logits)),
        "tally_ensemble": right(build_combiner(pool.combiner, pool.weights)(logits)),
        "tally": right(F.linear(test[0], student["head.weight"], student["head.bias"])),
        **{f"fens {name}": right(scores) for name, scores in fens(parts, test, classes_of(train[1]), seed).items()},
    }  # fmt: skip


def fens(parts: list[Labelled], test: Labelled, classes: int, seed: int) -> dict[str, Tensor]:
    """Return FENS' logits [N, C] on test features, by aggregator; the heads are of nine tenths of the examples."""
    rng = torch.Generator().manual_seed(derive_seed(seed, "fens", "held"))
    orders = [torch.randperm(len(labels), generator=rng) for _, labels in parts]  # a division lists a client's classes
    parts = [(rows[order], labels[order]) for (rows, labels), order in zip(parts, orders, strict=True)]
    splits = [max(1, math.floor(0.9 * len(labels))) for _, labels in parts]
    uploads = uploads_of([(rows[:end], own[:end]) for (rows, own), end in zip(parts, splits, strict=True)], classes)
    held = [
        (logits_of(uploads, rows[end:]).numpy(), labels[end:].numpy())
        for (rows, labels), end in zip(parts, splits, strict=True)
        if end < len(labels)
    ]
    logits, found = logits_of(uploads, test[0]), dict[str, Tensor]()
    for name, start in (("nn", "drawn"), ("per-class", "label-counts")):
        given = {**APP_DEFAULTS, "fens.precision": "float32", "fens.aggregator": name, "fens.start": start}
        own = {key: value for key, value in given.items() if key.startswith("fens.")}
        config = parse(FensConfig, own, "fens")
        outcome = fitted(job_of(uploads, config, seed), Silent(), Held(config, held, seed))
        spec = outcome.ensemble
        assert spec is not None
        found[name] = build_combiner(spec.combiner, spec.weights)(logits)
    return found


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, test = (extracted(arguments, half) for half in ("train", "test"))
    train = (train[0][: arguments.train or None], train[1][: arguments.train or None])
    kept = half_of(test[1], arguments.half)
    test = (test[0][kept], test[1][kept])
    width = arguments.dim or train[0].shape[1]
    if arguments.dim:
        basis = projection(train[0].shape[1], width, 0).float()
        train, test = ((F.normalize(rows @ basis), labels) for rows, labels in (train, test))
    out = Path(arguments.out)
    found = json.loads(out.read_text()) if out.exists() else {
        "data": arguments.data, "side": arguments.side, "features": width, "train": len(train[1]),
        "test": len(test[1]), "half": arguments.half, "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    known = {(row["clients"], row["alpha"], row["seed"]) for row in found["rows"]}
    for seed, clients, alpha in product(arguments.seeds, arguments.clients, arguments.alphas):
        if (clients, alpha, seed) not in known:
            found["rows"].append(cell(train, test, clients, alpha, seed))
            say(str(found["rows"][-1]))
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--train", type=int, default=0, help="first training images to use; 0 = all")
    parser.add_argument("--half", default="all", choices=HALVES, help="test images that score")
    parser.add_argument("--dim", type=int, default=0, help="features after the projection; 0 = all")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    parser.add_argument("--alphas", type=float, nargs="*", default=ALPHAS)
    main(parser.parse_args())
