"""FedPFT once more, in numpy: the draws from every client's Gaussians, and the head by AdamW, example by example."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.fedpft import METHOD, FedPftConfig, draw_features, numbers_within
from strategies.statistics.uploaded import ClientSumsOnServer, FeatureSums

Array = NDArray[np.float64]
CLASSES, FEATURES, SEED = 3, 5, 4
CONFIG = FedPftConfig(epochs=3, batch_size=8, lr=0.05)
SIZES = {"a": (6, 1, 0), "b": (0, 9, 12)}


def rows_of(client: str) -> tuple[Array, NDArray[np.int64]]:
    labels = np.repeat(np.arange(CLASSES), SIZES[client])
    rows = np.random.default_rng(ord(client)).random((len(labels), FEATURES)) + np.eye(CLASSES, FEATURES)[labels]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


def uploads() -> tuple[Upload, ...]:
    found = []
    for client in SIZES:
        rows, labels = rows_of(client)
        model = FeatureSums(CLASSES, FEATURES, torch.zeros(4, 32, dtype=torch.uint8), second=("squares",))
        sums = model.empty()
        sums[0].include(torch.from_numpy(rows), torch.from_numpy(labels))
        model.fill(*sums)
        facts = UploadFacts(client, "statistics", len(labels), None)
        found.append(Upload(facts, partial(dict, model.state_dict())))
    return tuple(found)


def drawn_in_numpy() -> tuple[Array, NDArray[np.int64]]:
    rows, labels = [], []
    for client in SIZES:
        mine, own = rows_of(client)
        several = [c for c in range(CLASSES) if SIZES[client][c] > 1]
        variances = {c: mine[own == c].var(0) for c in several}
        mean = sum(SIZES[client][c] * variances[c] for c in several) / sum(SIZES[client][c] for c in several)
        for c in set(own.tolist()):
            rng = generator(SEED, "fedpft", client, c)
            noise = torch.randn(SIZES[client][c], FEATURES, generator=rng).numpy()
            rows.append(mine[own == c].mean(0) + noise * np.sqrt(variances.get(c, mean)))
            labels += [c] * SIZES[client][c]
    return np.concatenate(rows), np.array(labels)


def test_draws_are_those_of_every_clients_gaussians() -> None:
    rows, labels = draw_features(ClientSumsOnServer(uploads()), CONFIG, seed=SEED)
    wanted, classes = drawn_in_numpy()
    assert labels.tolist() == classes.tolist()
    np.testing.assert_allclose(rows, wanted, atol=1e-5)


def test_limit_thins_all_clients_in_proportion_and_a_boastful_one_is_capped_first() -> None:
    def counts(boast: float, share: float, limit: int) -> list[int]:
        found = []
        for upload, factor in zip(uploads(), (boast, 100.0), strict=True):
            state = {
                key: value * factor if key in ("counts", "sums", "squares") else value
                for key, value in upload.read().items()
            }
            found.append(Upload(upload.facts, partial(dict, state)))
        labels = draw_features(ClientSumsOnServer(tuple(found), share), replace(CONFIG, limit=limit), seed=SEED)[1]
        return np.bincount(labels.numpy(), minlength=CLASSES).tolist()

    assert counts(100.0, 0.0, 280) == [60, 100, 120]
    assert counts(1e12, 0.5, 4200) == [1800, 1200, 1200]


@pytest.mark.parametrize("limit", [1, 37, 1000, 1999, 2000, 2001, 5000])
@pytest.mark.parametrize("boast", [1.0, 1e12])
def test_limit_holds_for_many_clients_of_many_classes(limit: int, boast: float) -> None:
    claimed = torch.randint(1, 9, (200, 10), generator=torch.Generator().manual_seed(limit)).double()
    claimed[0] *= boast
    numbers = numbers_within(claimed, limit)
    assert 0.95 * limit <= int(numbers.sum()) <= limit
    assert int(numbers.min()) >= (limit >= claimed.numel())
    if boast == 1.0:  # classes keep their shares
        wanted = claimed.sum(0) * limit / claimed.sum()
        assert float((numbers.sum(0) - wanted).abs().max()) <= 1.0 + 0.1 * limit / 10


def adamw(rows: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return weight and bias as one matrix's parts: decoupled weight decay 0.01, moments 0.9 and 0.999."""
    weights, moment, second, step = np.zeros((CLASSES, FEATURES + 1)), 0.0, 0.0, 0
    inputs = np.hstack([math.sqrt(FEATURES) * rows, np.ones((len(rows), 1))])
    for epoch in range(CONFIG.epochs):
        rate = CONFIG.lr * (1 + math.cos(math.pi * epoch / CONFIG.epochs)) / 2
        order = torch.randperm(len(rows), generator=generator(SEED, "fedpft", "epoch", epoch)).numpy()
        for start in range(0, len(rows), CONFIG.batch_size):
            some, step = order[start : start + CONFIG.batch_size], step + 1
            odds = np.exp(inputs[some] @ weights.T)
            gradient = (odds / odds.sum(1, keepdims=True) - np.eye(CLASSES)[labels[some]]).T @ inputs[some] / len(some)
            moment, second = 0.9 * moment + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            root = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            weights = weights * (1 - 0.01 * rate) - rate * moment / (1 - 0.9**step) / root
    return math.sqrt(FEATURES) * weights[:, :-1], weights[:, -1]


def head() -> nn.Module:
    return nn.Sequential(OrderedDict(head=nn.Linear(FEATURES, CLASSES)))


def test_head_is_that_of_adamw_on_the_draws() -> None:
    halves = Normalization((0.5,), (0.5,))
    job = Job(uploads(), {"head": head}, "head", CLASSES, (1, 8, 8), halves, CONFIG, seed=SEED)
    student = METHOD.fit(job, Silent()).student
    weight, bias = adamw(*drawn_in_numpy())
    np.testing.assert_allclose(student["head.weight"], weight, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(student["head.bias"], bias, rtol=1e-3, atol=1e-4)
