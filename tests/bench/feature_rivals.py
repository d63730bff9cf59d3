"""Ridge, LDA and FedPFT beside trained heads on the same features, over divisions, numbers of clients and seeds.

    python tests/bench/feature_rivals.py --root DATA --cache FOLDER --out docs/results/feature_rivals.json

It continues a file that it has begun. The clients' heads are linear and trained by AdamW on the same features: averaged
(FedAvg), the mean of their posteriors (FedENS), and their logits weighted by label counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from feature_gaussians import divided, fedpft
from features import ALPHAS, SEEDS, Labelled, accuracy, classes_of, extracted, parser_of
from measure import say
from torch import Tensor

from strategies.combiners.combiners import LabelCount
from strategies.statistics.choice import choose_penalty, choose_shrinkage
from strategies.statistics.heads import Head, Lda, Ridge
from strategies.statistics.sums import Statistics, projection

CLIENTS = (10, 100, 1000)
EPOCHS, BATCH, RATE = 20, 64, 1e-3


def trained(part: Labelled, classes: int, seed: int) -> Head:
    """Return a softmax head of one client, for features scaled to a deviation near 1."""
    rows, labels = part
    scale = rows.shape[1] ** 0.5
    weight = torch.zeros(classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], RATE)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(rows), generator=rng).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(F.linear(scale * rows[some], weight, bias), labels[some]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return Head((scale * weight).detach().double(), bias.detach().double())


def rivals(parts: list[Labelled], test: Labelled) -> dict[str, float]:
    """Return the accuracy of the clients' own heads, of their average and of two ensembles."""
    classes = classes_of(test[1])
    heads = [trained(part, classes, k) for k, part in enumerate(parts)]
    sizes = torch.tensor([len(labels) for _, labels in parts], dtype=torch.float64)
    counts = torch.stack([torch.bincount(labels, minlength=classes) for _, labels in parts])
    shares = sizes / sizes.sum()
    mean = Head(
        torch.einsum("k,kcd->cd", shares, torch.stack([head.weight for head in heads])),
        torch.einsum("k,kc->c", shares, torch.stack([head.bias for head in heads])),
    )
    logits = torch.stack([head.logits(test[0]) for head in heads])

    def right(scores: Tensor) -> float:
        return 100.0 * float((scores.argmax(1) == test[1]).double().mean())

    return {
        "alone": statistics.mean(right(own) for own in logits),
        "averaged": accuracy(mean, test),
        "fedens": right(logits.softmax(2).mean(0)),
        "label_counts": right(LabelCount(counts)(logits)),
    }


def cell(train: Labelled, test: Labelled, clients: int, alpha: float, seed: int) -> dict[str, Any]:
    """Return one row: all methods on one division."""
    parts, classes = divided(train, clients, alpha, seed), classes_of(train[1])
    sums = {f"client-{k:04d}": rounded(part, classes) for k, part in enumerate(parts)}
    began = time.process_time()
    total, penalty = Statistics.total(sums.values()), choose_penalty(sums, seed=seed).value
    ridge = accuracy(Ridge(total).head(penalty), test)
    spent = time.process_time() - began
    shrinkage = choose_shrinkage(sums, seed=seed).value
    lda = accuracy(Lda(total).head(shrinkage), test)
    return {
        "clients": clients, "alpha": alpha, "seed": seed, "holding": len(parts), "ridge": ridge, "lambda": penalty,
        "ridge_cpu_s": spent, "lda": lda, "a": shrinkage,
        "fedpft": accuracy(fedpft(parts, seed), test), **rivals(parts, test),
    }  # fmt: skip


def rounded(part: Labelled, classes: int) -> Statistics:
    """Return a client's sums as they arrive, in float32 on the wire."""
    exact = Statistics.of([part], classes, part[0].shape[1])
    return Statistics(exact.counts, exact.sums.float().double(), exact.gram.float().double())


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, test = (extracted(arguments, half) for half in ("train", "test"))
    kept = arguments.dim or train[0].shape[1]
    if arguments.dim:
        basis = projection(train[0].shape[1], kept, 0).float()
        train, test = ((F.normalize(rows @ basis), labels) for rows, labels in (train, test))
    out = Path(arguments.out)
    found = json.loads(out.read_text()) if out.exists() else {
        "data": arguments.data, "side": arguments.side, "features": kept, "train": len(train[1]), "test": len(test[1]),
        "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    known = {(row["clients"], row["alpha"], row["seed"]) for row in found["rows"]}
    for row in found["rows"]:
        if "fedpft" not in row:  # of a file from before FedPFT was there
            parts = divided(train, row["clients"], row["alpha"], row["seed"])
            row["fedpft"] = accuracy(fedpft(parts, row["seed"]), test)
            say(str(row))
            out.write_text(json.dumps(found, indent=1) + "\n")
    for seed, clients, alpha in product(SEEDS, CLIENTS, ALPHAS):
        if (clients, alpha, seed) not in known:
            found["rows"].append(cell(train, test, clients, alpha, seed))
            say(str(found["rows"][-1]))
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=0, help="features after the projection; 0 = all")
    main(parser.parse_args())
