"""FedPFT on features: a Gaussian per client and class, spherical or diagonal, beside ridge on the same divisions.

python tests/bench/feature_gaussians.py --root DATA --cache FOLDER --out docs/results/feature_gaussians.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import OrderedDict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from features import SEEDS, Labelled, accuracy, classes_of, extracted, parser_of
from measure import say
from torch import nn

from fl_app.data import PartitionSpec, partition
from strategies.core.facts import UploadFacts
from strategies.fedpft import METHOD, FedPftConfig
from strategies.method import Job, Normalization, Silent, Upload
from strategies.statistics.heads import Head
from strategies.statistics.uploaded import FeatureSums

HALVES, ALPHA, CLIENTS = Normalization((0.5,), (0.5,)), 0.1, (10, 100)


def upload(client: str, part: Labelled, classes: int) -> Upload:
    """Return a client's counts, sums and sums of squares."""
    rows, labels = part
    model = FeatureSums(classes, rows.shape[1], torch.zeros(4, 32, dtype=torch.uint8), second=("squares",))
    sums = model.empty()
    for some, own in zip(rows.split(4096), labels.split(4096), strict=True):
        sums[0].include(some, own)
    model.fill(*sums)
    return Upload(UploadFacts(client, "statistics", len(labels), None), partial(dict, model.state_dict()))


def fedpft(parts: list[Labelled], seed: int, **options: Any) -> Head:
    """Return FedPFT's head of the clients' examples."""
    classes = max(classes_of(labels) for _, labels in parts)
    uploads = tuple(upload(f"client-{k:04d}", part, classes) for k, part in enumerate(parts))
    features = parts[0][0].shape[1]
    builders = {"head": lambda: nn.Sequential(OrderedDict(head=nn.Linear(features, classes)))}
    job = Job(uploads, builders, "head", classes, (1, 8, 8), HALVES, FedPftConfig(**options), seed=seed)
    student = METHOD.fit(job, Silent()).student or {}
    return Head(student["head.weight"].double(), student["head.bias"].double())


def divided(train: Labelled, clients: int, alpha: float, seed: int) -> list[Labelled]:
    """Return the examples of every client that has any."""
    spec = PartitionSpec(law="dirichlet-classes", alpha=alpha)
    division = partition(train[1].numpy(), spec, num_clients=clients, num_classes=classes_of(train[1]), seed=seed)
    return [(train[0][part], train[1][part]) for part in map(torch.from_numpy, division) if len(part)]


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, test = (extracted(arguments, half) for half in ("train", "test"))
    found: dict[str, Any] = {
        "data": arguments.data, "side": arguments.side, "features": train[0].shape[1], "train": len(train[1]),
        "test": len(test[1]), "alpha": ALPHA, "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    for clients, covariance, seed in product(CLIENTS, ("diagonal", "spherical"), SEEDS):
        parts, began = divided(train, clients, ALPHA, seed), time.process_time()
        right = accuracy(fedpft(parts, seed, covariance=covariance), test)
        row = {"clients": clients, "covariance": covariance, "seed": seed, "fedpft": right}
        found["rows"].append({**row, "cpu_s": time.process_time() - began})
        say(str(found["rows"][-1]))
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    main(parser.parse_args())
