"""Ridge on noisy sums beside linear heads trained by DP-SGD on the same features, per budget.

    python tests/bench/feature_privacy.py --root DATA --cache FOLDER --out docs/results/feature_privacy.json

It continues a file that it has begun. Ridge has nothing to choose, with all features and with few. DP-SGD has few; its
rate and epochs are chosen at epsilon 1 on the selection half of the test images. All figures are those of the report
half, and ``ridge_all`` is ridge on all test images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from feature_gaussians import divided
from features import DELTA, Labelled, accuracy, classes_of, extracted, parser_of
from measure import say
from torch import nn

from client_app.private_training import train
from fl_app.config import ClientConfig
from fl_app.data import ImageData
from fl_app.data.halves import HALVES, half_of
from fl_app.privacy import PrivacyConfig
from strategies.statistics.heads import Head
from strategies.statistics.noisy import noisy_head
from strategies.statistics.privacy import deviation, released
from strategies.statistics.sums import Statistics, from_arrays, projection, to_arrays

ALPHA, CLIENTS, EPSILONS, CHOSEN_AT = 0.1, (10, 100), (0.5, 1.0, 2.0, 4.0, 8.0), 1.0
RATES, EPOCHS, BATCH = (0.0008, 0.004, 0.02, 0.1, 2.0, 8.0), (5, 20), 1024
WAYS = ("averaged", "fedens")
Halves = Mapping[str, Labelled]


def summed(part: Labelled, classes: int) -> Statistics:
    """Return a client's sums as they arrive."""
    batches = zip(part[0].split(4096), part[1].split(4096), strict=True)
    return from_arrays(to_arrays(Statistics.of(batches, classes, part[0].shape[1])))


def ridge(exact: Sequence[Statistics], epsilon: float) -> Head:
    """Return the head of sums with fresh noise at every client."""
    noisy = (released(own, epsilon, DELTA) for own in exact)
    return noisy_head(Statistics.total(noisy), [deviation(epsilon, DELTA)] * len(exact))


def private_head(part: Labelled, classes: int, epsilon: float, config: ClientConfig) -> nn.Linear:
    """Return a client's head, trained from zeros by DP-SGD."""
    head = nn.Linear(part[0].shape[1], classes)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    budget = PrivacyConfig(epsilon=epsilon, delta=DELTA)
    train(head, ImageData(*part), config, privacy=budget, normalization=((0.5,), (0.5,)), augmentation="none")
    return head


def combined(parts: Sequence[Labelled], test: Labelled, epsilon: float, config: ClientConfig) -> dict[str, float]:
    """Return the accuracy in % of the average of the clients' heads, and of their posteriors."""
    heads = [private_head(part, classes_of(test[1]), epsilon, config) for part in parts]
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


def chosen(parts: Sequence[Labelled], test: Labelled) -> dict[str, ClientConfig]:
    """Return the settings of DP-SGD that are best for the average of heads, and for the mean of posteriors."""
    tried = []
    for config in settings():
        tried.append((combined(parts, test, CHOSEN_AT, config), config))
        say(f"{len(parts)} clients, rate {config.lr}, {config.epochs} epochs: {tried[-1][0]}")
    return {way: max(tried, key=lambda one, way=way: one[0][way])[1] for way in WAYS}  # type: ignore[misc]


def ridge_row(exact: Sequence[Statistics], epsilon: float, test: Halves, draws: int) -> dict[str, Any]:
    """Return the accuracy of ridge for every draw of the noise, on the report half and on all test images."""
    heads = [ridge(exact, epsilon) for _ in range(draws)]
    row = {"features": exact[0].features, "clients": len(exact), "epsilon": epsilon}
    halves = {"ridge": test["report"], "ridge_all": test["all"]}
    return {**row, **{key: [accuracy(head, half) for head in heads] for key, half in halves.items()}}


def rows_of(
    parts: Sequence[Labelled], test: Halves, epsilons: Sequence[float], draws: int, most: int
) -> Iterator[dict[str, Any]]:
    """Yield a row per budget for one division; with at most so many features DP-SGD too."""
    exact = [summed(part, classes_of(test["all"][1])) for part in parts]
    settled = chosen(parts, test["selection"]) if exact[0].features <= most else {}
    for epsilon in epsilons:
        row = ridge_row(exact, epsilon, test, draws)
        for way, config in settled.items():
            row[way] = [combined(parts, test["report"], epsilon, config)[way] for _ in range(draws)]
            row[f"{way}_chosen"] = {"rate": config.lr, "epochs": config.epochs}
        yield row


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    whole, held_out = (extracted(arguments, half) for half in ("train", "test"))
    out = Path(arguments.out)
    found = json.loads(out.read_text()) if out.exists() else {
        "data": arguments.data, "train": len(whole[1]), "test": len(held_out[1]), "alpha": ALPHA, "delta": DELTA,
        "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    known = {(row["features"], row["clients"], row["epsilon"]) for row in found["rows"]}
    for kept, clients in product((arguments.dim, whole[0].shape[1]), CLIENTS):
        missing = [epsilon for epsilon in EPSILONS if (kept, clients, epsilon) not in known]
        if not missing:
            continue
        basis = projection(whole[0].shape[1], kept, 0).float() if kept == arguments.dim else None
        train_half, test = (
            (rows if basis is None else F.normalize(rows @ basis), labels) for rows, labels in (whole, held_out)
        )
        halves = {half: (test[0][own], test[1][own]) for half in HALVES for own in [half_of(test[1], half)]}
        for row in rows_of(divided(train_half, clients, ALPHA, 0), halves, missing, arguments.draws, arguments.trained):
            found["rows"].append(row)
            say(str(row))
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=256, help="features after the projection")
    parser.add_argument("--trained", type=int, default=256, help="the most features on which DP-SGD trains too")
    parser.add_argument("--draws", type=int, default=3)
    main(parser.parse_args())
