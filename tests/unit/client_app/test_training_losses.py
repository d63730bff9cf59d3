from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from client_app.training.losses import loss_of
from fl_app.config import ClientConfig


def by_formula(logits: np.ndarray, labels: np.ndarray, counts: np.ndarray, *, largest: float, scale: float) -> float:
    """The formulas of the paper, one example after another."""
    gamma = np.array([n ** (-1 / 4) if n else 0.0 for n in counts])
    delta = largest * gamma / gamma.max()
    losses = []
    for z, y in zip(logits, labels, strict=True):
        own = math.exp(scale * (z[y] - delta[y]))
        others = sum(math.exp(scale * z[j]) for j in range(len(z)) if j != y)
        losses.append(-math.log(own / (own + others)))
    return float(np.mean(losses))


@pytest.mark.parametrize(("largest", "scale"), [(0.5, 30.0), (1.3, 4.0)])
def test_ldam_when_classes_are_skewed_equals_the_formula(
    largest: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    labels = np.concatenate([np.zeros(40, int), np.full(7, 1), np.full(2, 3)])
    counts = np.bincount(labels, minlength=5)  # two classes are absent, the last among them
    logits = rng.normal(size=(len(labels), 5)) * 0.3
    monkeypatch.setattr("client_app.training.losses.LARGEST_MARGIN", largest)
    monkeypatch.setattr("client_app.training.losses.SCALE", scale)
    config = ClientConfig(loss="ldam")

    loss = loss_of(config, torch.from_numpy(labels))(torch.from_numpy(logits).float(), torch.from_numpy(labels))

    expected = by_formula(logits, labels, counts, largest=largest, scale=scale)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
