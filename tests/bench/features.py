"""The figures of docs/features.md: heads from sums of a frozen backbone's features, on one extraction.

    python tests/bench/features.py --root DATA --cache FOLDER --out docs/results/features.json

The first call extracts the features of all images once (CIFAR-10: about ten minutes of one core) into the cache folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure import say
from torch import Tensor

from fl_app.data import PartitionSpec, normalize, open_split, partition
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from strategies.statistics.choice import choose_penalty, choose_shrinkage
from strategies.statistics.heads import Head, Lda, Ridge
from strategies.statistics.sums import Statistics, from_arrays, projection, to_arrays

CLASSES, CHUNK, DELTA = 10, 256, 1e-5
ALPHAS, CLIENTS, SEEDS = (0.05, 0.1, 0.5, 100.0), (10, 100, 1000), (0, 1, 2)
Labelled = tuple[Tensor, Tensor]


def extracted(arguments: argparse.Namespace, half: str) -> Labelled:
    """Return features of norm 1 [N, d] in float32 with labels [N], from the cache where they are there."""
    data, side, cache = arguments.data, arguments.side, Path(arguments.cache)
    file = cache / f"{data}-{half}-{side}-{arguments.limit}.npy"
    split = open_split(data, half, root=arguments.root)
    count = min(len(split.labels), arguments.limit or len(split.labels))
    if not file.exists():
        function = FeatureFunction(FeaturesConfig(side=side), 0, *split.normalization)
        rows, began = [], time.monotonic()
        for start in range(0, count, CHUNK):
            images = split.take(torch.arange(start, min(start + CHUNK, count))).images
            rows.append(function.module(normalize(images, *split.normalization)).float().numpy())
            if start % (20 * CHUNK) == 0:
                say(f"{half} {start}: {(start + CHUNK) / (time.monotonic() - began):.0f} images/s")
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, np.concatenate(rows))
    return torch.from_numpy(np.load(file)), split.labels[:count]


def accuracy(head: Head, test: Labelled) -> float:
    return 100.0 * float((head.logits(test[0]).argmax(1) == test[1]).double().mean())


class Compact(Mapping[str, Statistics]):
    """Statistics as they travel, in float32, so that those of many clients fit into the memory."""

    def __init__(self) -> None:
        self._arrays: dict[str, dict[str, Tensor]] = {}

    def add(self, client: str, statistics: Statistics) -> None:
        self._arrays[client] = to_arrays(statistics)

    def __getitem__(self, client: str) -> Statistics:
        return from_arrays(self._arrays[client])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def clients_of(train: Labelled, count: int, alpha: float, seed: int) -> Compact:
    """Return every client's statistics as they arrive: float64 sums, rounded once to float32."""
    rows, labels = train
    parts = partition(
        labels.numpy(), PartitionSpec(law="dirichlet-classes", alpha=alpha), num_clients=count, num_classes=CLASSES,
        seed=seed,
    )  # fmt: skip
    found = Compact()
    for k, part in enumerate(part for part in parts if len(part)):
        mine = torch.from_numpy(part)
        batches = ((rows[some], labels[some]) for some in mine.split(4096))
        found.add(f"client-{k:04d}", Statistics.of(batches, CLASSES, rows.shape[1]))
    return found


def exact_rows(
    train: Labelled, test: Labelled, counts: Sequence[int], alphas: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield ridge and LDA for every split, and how long choice and solve take."""
    for seed, count, alpha in product(SEEDS, counts, alphas):
        clients = clients_of(train, count, alpha, seed)
        began = time.process_time()
        total = Statistics.total(clients.values())
        penalty = choose_penalty(clients, seed=seed).value
        ridge = accuracy(Ridge(total).head(penalty), test)
        seconds = time.process_time() - began
        shrinkage = choose_shrinkage(clients, seed=seed).value
        row = {"clients": count, "alpha": alpha, "seed": seed, "ridge": ridge, "lambda": penalty}
        yield {**row, "lda": accuracy(Lda(total).head(shrinkage), test), "a": shrinkage, "cpu_s": seconds}


def by_upload(train: Labelled, test: Labelled) -> Iterator[dict[str, Any]]:
    """Yield the accuracy for fewer features, each with its own penalty."""
    for kept in (64, 128, 256, 512, train[0].shape[1]):
        basis = projection(train[0].shape[1], kept, 0).float()
        small, probe = ((F.normalize(rows @ basis), labels) for rows, labels in (train, test))
        clients = clients_of(small, 10, 0.1, 0)
        penalty = choose_penalty(clients, seed=0).value
        total = Statistics.total(clients.values())
        kib = sum(value.numel() * value.element_size() for value in to_arrays(total).values()) / 1024
        yield {"features": kept, "kib": kib, "lambda": penalty, "ridge": accuracy(Ridge(total).head(penalty), probe)}


def main(arguments: argparse.Namespace) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    train, test = (extracted(arguments, half) for half in ("train", "test"))
    found: dict[str, Any] = {
        "data": arguments.data,
        "side": arguments.side,
        "train": len(train[1]),
        "test": len(test[1]),
        "torch": torch.__version__,
    }
    for key, rows in (
        ("upload", by_upload(train, test)),
        ("exact", exact_rows(train, test, arguments.clients, arguments.alphas)),
    ):
        found[key] = []
        for row in rows:
            say(f"{key} {row}")
            found[key].append(row)
            Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--limit", type=int, default=0, help="first images of each half; 0 = all")
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    main(parser.parse_args())
