"""The ridge regression that fedavg averages: its weights, its precision, and what it refuses."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fl_app.models.regression import PENALTY, Regression, evaluate, train

CONFIG = SimpleNamespace(weight_decay=0.0)


def examples(mean: float, std: float = 1.0, number: int = 5000) -> tuple[Tensor, Tensor]:
    """Return features [N, 3] in float64, of which the second has this mean and deviation, and targets [N, 1]."""
    rows = torch.randn(number, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = rows @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return rows * torch.tensor([1.0, std, 1.0]) + torch.tensor([0.0, mean, 0.0]), targets


def trained(rows: Tensor, targets: Tensor, **config: float) -> Regression:
    model = Regression(targets.shape[1] if targets.dim() > 1 else 1, (rows.shape[1],))
    train(model, TensorDataset(rows, targets), SimpleNamespace(**{"weight_decay": 0.0, **config}))
    return model


@pytest.mark.parametrize(
    ("mean", "std", "hidden"),
    [
        (0.0, 1.0, False), (9e4, 1.0, False), (0.9, 1e-5, False), (1.0, 0.0, False), (0.0, 0.0, False),
        (2e5, 1.0, True), (1e7, 1.0, True), (1e7, 0.0, True),
    ],
)  # fmt: skip
def test_a_feature_far_from_0_has_exact_weights_or_is_refused(mean: float, std: float, hidden: bool) -> None:
    rows, targets = examples(mean, std)
    model = trained(rows, targets)
    if hidden:
        with pytest.raises(
            ValueError, match=f"feature 1 has mean {re.escape(f'{mean:g}')} .*: subtract a constant near its mean"
        ):
            model.solve()
        scores = evaluate(model, TensorDataset(rows, targets))
        assert all(map(math.isnan, scores.values()))
        return
    strength = PENALTY * float((rows - rows.mean(0)).square().sum()) / 3
    wanted = Ridge(alpha=strength).fit((rows - rows.mean(0)).numpy(), targets.numpy())
    np.testing.assert_allclose(model.solve()[0].numpy(), np.atleast_2d(wanted.coef_), rtol=1e-4, atol=1e-8)


def test_all_features_that_are_hidden_are_refused_and_zeros_are_not() -> None:
    constant = torch.full((7, 2), 0.1)
    with pytest.raises(ValueError, match="feature 0 has mean 0.1"):
        trained(constant, torch.ones(7)).solve()
    assert [each.tolist() for each in Regression(1, (2,)).solve()] == [[[0.0, 0.0]], [0.0]]


def test_products_of_whole_numbers_are_exact() -> None:
    """Above 2**24 float32 would round them."""
    rows, targets = torch.tensor([[1.0], [0.0]]), torch.tensor([2**24 + 1, 0])
    assert trained(rows, targets).products[0].tolist() == [1.0, 0.5, (2**24 + 1) / 2]


@pytest.mark.parametrize("number", [1, 4096, 5000])
def test_products_and_scores_are_those_of_all_batches(number: int) -> None:
    rows, targets = examples(0.3, number=number)
    model = trained(rows, targets, weight_decay=0.5)
    z = torch.cat([torch.ones(number, 1), rows, targets], dim=1)
    torch.testing.assert_close(model.products.data, z.T @ z / number, rtol=1e-12, atol=1e-12)
    assert float(model.penalty) == 0.5
    if number > 1:
        wrong = model(rows).double() - targets
        scores = evaluate(model, TensorDataset(rows, targets))
        assert scores["mae"] == pytest.approx(float(wrong.abs().mean()), rel=1e-5)


@pytest.mark.parametrize("function", [lambda *given: train(*given, CONFIG), evaluate], ids=["train", "evaluate"])
@pytest.mark.parametrize(
    ("model", "shapes", "said"),
    [
        (
            nn.Linear(3, 1),
            ((4, 3), (4, 1)),
            "model is Linear: 'model.name' must be fl_app.models.regression:Regression",
        ),
        (Regression(1, (3,)), ((4, 2), (4, 1)), "data has 2 features and 1 targets per example: must have 3 and 1"),
        (Regression(2, (3,)), ((4, 3), (4,)), "data has 3 features and 1 targets per example: must have 3 and 2"),
    ],
    ids=["model", "features", "targets"],
)
def test_another_model_or_data_is_refused_in_a_sentence(function: Any, model: Any, shapes: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        function(model, TensorDataset(*map(torch.ones, shapes)))
