"""Ridge on noisy sums beside linear heads trained by DP-SGD on the same features, per budget.

    python tests/bench/feature_privacy.py --root DATA --cache FOLDER --out docs/results/feature_privacy.json

It continues a file that it has begun. Ridge has nothing to choose. Rate and epochs of DP-SGD are chosen at epsilon 1 on
the selection half of the test images; all figures are those of the report half.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from feature_gaussians import divided
from features import CLASSES, DELTA, Labelled, accuracy, extracted
from measure import say
from torch import nn

from client_app.private_training import train
from fl_app.config import ClientConfig
from fl_app.data import ImageData
from fl_app.data.halves import half_of
from fl_app.privacy import PrivacyConfig
from strategies.statistics.heads import Head
from strategies.statistics.noisy import noisy_head
from strategies.statistics.privacy import deviation, released
from strategies.statistics.sums import Statistics, from_arrays, projection, to_arrays

ALPHA, CLIENTS, EPSILONS, CHOSEN_AT = 0.1, (10, 100), (0.5, 1.0, 2.0, 4.0, 8.0), 1.0
RATES, EPOCHS, BATCH = (0.5, 2.0, 8.0), (5, 20), 1024
Halves = Mapping[str, Labelled]


def summed(part: Labelled) -> Statistics:
    """Return a client's sums as they arrive."""
    batches = zip(part[0].split(4096), part[1].split(4096), strict=True)
    return from_arrays(to_arrays(Statistics.of(batches, CLASSES, part[0].shape[1])))


def ridge(exact: Sequence[Statistics], epsilon: float) -> Head:
    """Return the head of sums with fresh noise at every client."""
    noisy = (released(own, epsilon, DELTA) for own in exact)
    return noisy_head(Statistics.total(noisy), [deviation(epsilon, DELTA)] * len(exact))


def private_head(part: Labelled, epsilon: float, config: ClientConfig) -> nn.Linear:
    """Return a client's head, trained from zeros by DP-SGD."""
    head = nn.Linear(part[0].shape[1], CLASSES)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    budget = PrivacyConfig(epsilon=epsilon, delta=DELTA)
    train(head, ImageData(*part), config, privacy=budget, normalization=((0.5,), (0.5,)), augmentation="none")
    return head


def combined(parts: Sequence[Labelled], test: Labelled, epsilon: float, config: ClientConfig) -> dict[str, float]:
    """Return the accuracy in % of the average of the clients' heads, and of their posteriors."""
    heads = [private_head(part, epsilon, config) for part in parts]
    sizes = torch.tensor([len(labels) for _, labels in parts], dtype=torch.float64)
    weights = torch.stack([head.weight.detach() for head in heads]).double()
    biases = torch.stack([head.bias.detach() for head in heads]).double()
    shares = sizes / sizes.sum()
    mean = Head(torch.einsum("k,kcd->cd", shares, weights), torch.einsum("k,kc->c", shares, biases))
    logits = torch.einsum("nd,kcd->knc", test[0].double(), weights) + biases[:, None]
    right = (logits.softmax(2).mean(0).argmax(1) == test[1]).double().mean()
    return {"averaged": accuracy(mean, test), "fedens": 100.0 * float(right)}


def settings() -> list[ClientConfig]:
    """Return the candidates for DP-SGD."""
    return [
        ClientConfig(epochs=epochs, batch_size=BATCH, lr=rate, momentum=0.0) for epochs, rate in product(EPOCHS, RATES)
    ]


def rows_of(parts: Sequence[Labelled], halves: Halves, done: set[float], draws: int) -> Any:
    """Yield a row per budget for one division."""
    missing = [epsilon for epsilon in EPSILONS if epsilon not in done]
    if not missing:
        return
    exact = [summed(part) for part in parts]
    tried = [(combined(parts, halves["selection"], CHOSEN_AT, config), config) for config in settings()]
    for found, config in tried:
        say(f"{len(parts)} clients, rate {config.lr}, {config.epochs} epochs: {found}")
    chosen = {way: max(tried, key=lambda one, way=way: one[0][way])[1] for way in ("averaged", "fedens")}  # type: ignore[misc]
    for epsilon in missing:
        row: dict[str, Any] = {"clients": len(parts), "epsilon": epsilon}
        row["ridge"] = [accuracy(ridge(exact, epsilon), halves["report"]) for _ in range(draws)]
        for way, config in chosen.items():
            row[way] = [combined(parts, halves["report"], epsilon, config)[way] for _ in range(draws)]
            row[f"{way}_chosen"] = {"rate": config.lr, "epochs": config.epochs}
        yield row


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    train_half, test = (extracted(arguments, half) for half in ("train", "test"))
    basis = projection(train_half[0].shape[1], arguments.dim, 0).float()
    train_half, test = ((F.normalize(rows @ basis), labels) for rows, labels in (train_half, test))
    positions = {half: half_of(test[1], half) for half in ("selection", "report")}
    halves = {half: (test[0][own], test[1][own]) for half, own in positions.items()}
    out = Path(arguments.out)
    found = json.loads(out.read_text()) if out.exists() else {
        "data": arguments.data, "features": arguments.dim, "train": len(train_half[1]), "alpha": ALPHA, "delta": DELTA,
        "report": len(halves["report"][1]), "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    for clients in CLIENTS:
        parts = divided(train_half, clients, ALPHA, 0)
        done = {row["epsilon"] for row in found["rows"] if row["clients"] == len(parts)}
        for row in rows_of(parts, halves, done, arguments.draws):
            found["rows"].append(row)
            say(str(row))
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--limit", type=int, default=0, help="first images of each half; 0 = all")
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256, help="features after the projection")
    parser.add_argument("--draws", type=int, default=3)
    main(parser.parse_args())
