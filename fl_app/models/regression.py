"""Ridge regression of numbers by a run's average of weights: clients add up, and nobody trains.

A client's "weights" are the mean products of its examples. Their mean over clients by examples, which ``fedavg`` takes,
is that of all examples, whatever their division; so the regression is that of all of them in one place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.statistics.heads import solve_ridge

BATCH = 4096
PENALTY = 1e-3  # where client.weight-decay is 0


class Regression(nn.Module):
    """A ridge regression, solved from mean products of examples whenever it predicts: [B, ...] -> float32 [B, m].

    It minimises ``||F W^T + 1 b^T - Y||^2 + l ||W||^2`` with ``l = lambda tr(A) / d``, as
    :func:`strategies.methods.ridge.ridge_regression` does; A is the features' scatter around their mean.

    Attributes:
        products: Mean of z z^T with z = (1, f, y), float64 [1 + d + m, 1 + d + m].
        penalty: lambda, above 0.
    """

    products: Tensor
    penalty: Tensor

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features, self.targets = math.prod(input_shape), num_classes
        size = 1 + self.features + self.targets
        self.register_buffer("products", torch.zeros(size, size, dtype=torch.float64))
        self.register_buffer("penalty", torch.tensor(PENALTY, dtype=torch.float64))

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return W [m, d] and b [m] in float64; without examples, or with constant features, W is 0."""
        mean, second = self.products[0, 1:], self.products[1:, 1:]
        around = second - torch.outer(mean, mean)
        scatter, right = around[: self.features, : self.features].clone(), around[: self.features, self.features :]
        strength = float(self.penalty * scatter.trace() / self.features)
        weight = solve_ridge(scatter, right, strength).T if strength > 0 else torch.zeros_like(right.T)
        return weight, mean[self.features :] - weight @ mean[: self.features]

    def forward(self, x: Tensor) -> Tensor:
        """Predict the targets of examples."""
        weight, bias = self.solve()
        return (x.flatten(1).double() @ weight.T + bias).float()


def add_up(model: Regression, data: TensorDataset, config: Any) -> None:
    """Fill a regression with the mean products of a client's examples, as ``model.train`` does.

    Args:
        data: Examples [N, ...] and targets [N, m], or [N] for one.
        config: Whose ``weight_decay`` is lambda; 0: :data:`PENALTY`.
    """
    total = torch.zeros_like(model.products)
    for rows, targets in DataLoader(data, BATCH):
        z = torch.cat([torch.ones(len(rows), 1), rows.flatten(1), targets.reshape(len(rows), -1)], dim=1).double()
        total += z.T @ z
    model.products.copy_(total / len(data))
    model.penalty.fill_(config.weight_decay or PENALTY)


def scores(model: nn.Module, data: TensorDataset) -> dict[str, float]:
    """Return R2, the mean over the targets, and errors in their unit, as ``model.evaluate`` does."""
    wanted, wrong = list[Tensor](), list[Tensor]()
    for rows, targets in DataLoader(data, BATCH):
        wanted.append(targets.reshape(len(rows), -1).double())
        wrong.append(model(rows).double() - wanted[-1])
    truth, errors = torch.cat(wanted), torch.cat(wrong)
    spread = (truth - truth.mean(0)).square().sum(0)
    shares = 1.0 - errors.square().sum(0) / spread
    return {
        "r2": float(shares.mean()),
        "mae": float(errors.abs().mean()),
        "rmse": float(errors.square().mean().sqrt()),
    }
