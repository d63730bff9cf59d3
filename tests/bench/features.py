"""The figures of docs/features.md: heads from sums of a frozen backbone's features, on one extraction.

    python tests/bench/features.py --root DATA --cache FOLDER --out docs/results/features.json
    python tests/bench/features.py --data ag-news --backbone wordllama --maps 1024 2048 --root DATA \
        --cache FOLDER --out docs/results/feature_texts.json

It continues a file that it has begun. The first call extracts all features once into the cache folder, for CIFAR-10 in
about ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure import say
from torch import Tensor

from fl_app.data import PartitionSpec, normalize, open_split, partition
from fl_app.models.features import FeatureFunction, as_read
from fl_app.models.features_config import PACKAGED, FeaturesConfig
from strategies.statistics.choice import choose_penalty, choose_shrinkage
from strategies.statistics.heads import Head, Lda, Ridge
from strategies.statistics.maps import ReluMap
from strategies.statistics.privacy import normalised
from strategies.statistics.sums import Statistics, from_arrays, projection, to_arrays

CHUNK, DELTA = 256, 1e-5
MAP_CLIENTS = 3  # whose choice of the penalty takes a solve each, which a wide map makes slow
ALPHAS, CLIENTS, SEEDS = (0.05, 0.1, 0.5, 100.0), (10, 100, 1000), (0, 1, 2)
Labelled = tuple[Tensor, Tensor]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every bench on features."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--backbone", default=PACKAGED)
    parser.add_argument("--limit", type=int, default=0, help="first examples of each half; 0 = all")
    parser.add_argument("--side", type=int, default=128)
    return parser


def extracted(arguments: argparse.Namespace, half: str) -> Labelled:
    """Return features of norm 1 [N, d] in float32 with labels [N], from the cache where they are there."""
    data, side, cache = arguments.data, arguments.side, Path(arguments.cache)
    file = cache / f"{data}-{half}-{side}-{arguments.limit}.npy"
    split = open_split(data, half, root=arguments.root)
    count = min(len(split.labels), arguments.limit or len(split.labels))
    if not file.exists():
        config = FeaturesConfig(backbone=arguments.backbone, side=side)
        split, function = as_read(split, config), FeatureFunction(config, 0, *split.normalization)
        rows, began = [], time.monotonic()
        for start in range(0, count, CHUNK):
            images = split.take(torch.arange(start, min(start + CHUNK, count))).images
            rows.append(function.module(normalize(images, *split.normalization)).float().numpy())
            if start % (20 * CHUNK) == 0:
                say(f"{half} {start}: {(start + CHUNK) / (time.monotonic() - began):.0f} examples/s")
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, np.concatenate(rows))
    return torch.from_numpy(np.load(file)), split.labels[:count]


def classes_of(labels: Tensor) -> int:
    """Return C, by the labels of a whole half."""
    return int(labels.max()) + 1


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
    (rows, labels), classes = train, classes_of(train[1])
    parts = partition(
        labels.numpy(), PartitionSpec(law="dirichlet-classes", alpha=alpha), num_clients=count, num_classes=classes,
        seed=seed,
    )  # fmt: skip
    found = Compact()
    for k, part in enumerate(part for part in parts if len(part)):
        mine = torch.from_numpy(part)
        batches = ((rows[some], labels[some]) for some in mine.split(4096))
        found.add(f"client-{k:04d}", Statistics.of(batches, classes, rows.shape[1]))
    return found


def exact_rows(train: Labelled, test: Labelled, splits: Sequence[tuple[int, int, float]]) -> Iterator[dict[str, Any]]:
    """Yield ridge and LDA for every seed, number of clients and alpha, and how long choice and solve take."""
    for seed, count, alpha in splits:
        clients = clients_of(train, count, alpha, seed)
        began = time.process_time()
        total = Statistics.total(clients.values())
        penalty = choose_penalty(clients, seed=seed).value
        ridge = accuracy(Ridge(total).head(penalty), test)
        seconds = time.process_time() - began
        shrinkage = choose_shrinkage(clients, seed=seed).value
        row = {"clients": count, "alpha": alpha, "seed": seed, "ridge": ridge, "lambda": penalty}
        yield {**row, "lda": accuracy(Lda(total).head(shrinkage), test), "a": shrinkage, "cpu_s": seconds}


def by_upload(train: Labelled, test: Labelled, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the accuracy for fewer features, each with its own penalty."""
    for kept in numbers:
        basis = projection(train[0].shape[1], kept, 0).float()
        small, probe = ((F.normalize(rows @ basis), labels) for rows, labels in (train, test))
        clients = clients_of(small, 10, 0.1, 0)
        penalty = choose_penalty(clients, seed=0).value
        total = Statistics.total(clients.values())
        kib = sum(value.numel() * value.element_size() for value in to_arrays(total).values()) / 1024
        yield {"features": kept, "kib": kib, "lambda": penalty, "ridge": accuracy(Ridge(total).head(penalty), probe)}


def by_map(train: Labelled, test: Labelled, widths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield ridge on features that a fixed random map bends."""
    for width in widths:
        bend = ReluMap.of(train[0].shape[1], width, 0)
        bent, probe = (
            (torch.cat([normalised(bend(some)).float() for some in rows.split(CHUNK)]), labels)
            for rows, labels in (train, test)
        )
        clients = clients_of(bent, MAP_CLIENTS, 0.1, 0)
        penalty = choose_penalty(clients, seed=0).value
        total = Statistics.total(clients.values())
        kib = sum(value.numel() * value.element_size() for value in to_arrays(total).values()) / 1024
        yield {"width": width, "kib": kib, "lambda": penalty, "ridge": accuracy(Ridge(total).head(penalty), probe)}


def missing(begun: Sequence[Mapping[str, Any]], names: Sequence[str], wanted: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the wanted values of some keys that no row has; of a single key the values themselves."""
    known = {tuple(row[name] for name in names) for row in begun}
    return [value if len(names) > 1 else value[0] for value in wanted if value not in known]


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train, test = (extracted(arguments, half) for half in ("train", "test"))
    out, whole = Path(arguments.out), train[0].shape[1]
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {
        "data": arguments.data, "backbone": arguments.backbone, "side": arguments.side, "train": len(train[1]),
        "test": len(test[1]), "torch": torch.__version__,
    }  # fmt: skip
    kept = (*(few for few in (64, 128, 256, 512) if few < whole), whole)
    splits = [*product(SEEDS, arguments.clients, arguments.alphas)]
    begun = {key: found.setdefault(key, []) for key in ("upload", "exact", "maps")}
    for key, rows in (
        ("upload", by_upload(train, test, missing(begun["upload"], ["features"], zip(kept, strict=True)))),
        ("exact", exact_rows(train, test, missing(begun["exact"], ["seed", "clients", "alpha"], splits))),
        ("maps", by_map(train, test, missing(begun["maps"], ["width"], zip(arguments.maps, strict=True)))),
    ):
        for row in rows:
            say(f"{key} {row}")
            found[key].append(row)
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--maps", type=int, nargs="*", default=(), help="widths of fixed random maps")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    main(parser.parse_args())
