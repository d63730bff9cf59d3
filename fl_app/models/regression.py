"""Ridge regression as a model that ``fedavg`` can average: its weights are the sufficient statistics.

They are the second-moment matrix of (1, x, y), the mean over a client's examples. The mean over clients by numbers of
examples is that of all examples, however they are divided; so the averaged model predicts with the regression of all of
them in one place. Clients pass over their examples once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from strategies.core.scan import log_once
from strategies.statistics.heads import solve_regression

BATCH = 4096
PENALTY = 1e-3  # where client.weight-decay is 0
# The largest squared mean of a feature, by its penalised variance: the variance is the difference of two sums as large,
# so 4 or 5 of float64's 16 digits are left of it.
LARGEST = 1e10


class Regression(nn.Module):
    """A ridge regression, solved from the weights whenever it predicts: [B, ...] -> float32 [B, m].

    It minimises ``||F W^T + 1 b^T - Y||^2 + l ||W||^2`` with ``l = lambda tr(A) / d``, as
    :func:`strategies.methods.ridge.ridge_regression` does; A is the features' scatter around their mean.

    Attributes:
        products: Mean of z z^T with z = (1, f, y), float64 [1 + d + m, 1 + d + m].
        penalty: lambda, above 0.
        means_of_examples: Tells the server that only an average by numbers of examples merges such models.
    """

    means_of_examples = True

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features, self.targets = math.prod(input_shape), num_classes
        size = 1 + self.features + self.targets
        # No buffers: fedavg.bn-buffers=first takes those of one client.
        self.products = nn.Parameter(torch.zeros(size, size, dtype=torch.float64), requires_grad=False)
        self.penalty = nn.Parameter(torch.tensor(PENALTY, dtype=torch.float64), requires_grad=False)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return W [m, d] and b [m] in float64; zeros without examples.

        Raises:
            ValueError: A feature's mean is so large that rounding hides its variance.
        """
        mean, second = self.products[0, 1:], self.products[1:, 1:]
        around = second - torch.outer(mean, mean)
        scatter, right = around[: self.features, : self.features], around[: self.features, self.features :]
        variance = scatter.diagonal().clamp_min(0.0)
        hidden = mean[: self.features].square() > LARGEST * (variance + self.penalty * variance.mean())
        if hidden.any():
            first = int(hidden.nonzero()[0, 0])
            raise ValueError(
                f"feature {first} has mean {float(mean[first]):g} and variance {float(variance[first]):g}, which "
                "rounding hides: subtract a constant near its mean, as 'mean' of the column does in schema.toml"
            )
        return solve_regression(scatter.clone(), right, mean, float(self.penalty))

    def forward(self, x: Tensor) -> Tensor:
        """Predict the targets of examples."""
        weight, bias = self.solve()
        return (x.flatten(1).double() @ weight.T + bias).float()


def train(model: nn.Module, data: TensorDataset, config: Any) -> None:
    """Fill a regression with the mean products of a client's examples, as ``model.train`` does.

    Args:
        data: Examples [N, ...] and targets [N, m], or [N] for one.
        config: Whose ``weight_decay`` is lambda; 0: :data:`PENALTY`.

    Raises:
        TypeError: The model is another.
        ValueError: The data has another number of features or targets.
    """
    model = _checked(model, data)
    total = torch.zeros_like(model.products)
    for rows, targets in _batches(data):
        z = torch.cat([rows.new_ones(len(rows), 1), rows, targets], dim=1)
        total += z.T @ z
    model.products.copy_(total / len(data))
    model.penalty.fill_(config.weight_decay or PENALTY)


def evaluate(model: nn.Module, data: TensorDataset) -> dict[str, float]:
    """Return R2, the mean over the targets, and errors in their unit, as ``model.evaluate`` does.

    They are NaN where the model cannot be solved, and the log says why.

    Raises:
        TypeError: The model is another.
        ValueError: The data has another number of features or targets.
    """
    model = _checked(model, data)
    try:
        weight, bias = model.solve()
    except ValueError as error:  # of one client's model, perhaps: others have scores
        log_once(WARNING, f"a regression has no scores: {error}")
        return dict.fromkeys(("r2", "mae", "rmse"), math.nan)
    wanted, wrong = list[Tensor](), list[Tensor]()
    for rows, targets in _batches(data):
        wanted.append(targets)
        wrong.append(rows @ weight.T + bias - targets)
    truth, errors = torch.cat(wanted), torch.cat(wrong)
    spread = (truth - truth.mean(0)).square().sum(0)
    shares = 1.0 - errors.square().sum(0) / spread
    return {
        "r2": float(shares.mean()),
        "mae": float(errors.abs().mean()),
        "rmse": float(errors.square().mean().sqrt()),
    }


def _checked(model: nn.Module, data: TensorDataset) -> Regression:
    """Return the model, which must be a regression of as many features and targets as the data has."""
    if not isinstance(model, Regression):
        raise TypeError(f"model is {type(model).__name__}: 'model.name' must be {__name__}:{Regression.__name__}")
    rows, targets = data.tensors
    found = math.prod(rows.shape[1:]), math.prod(targets.shape[1:])
    if found != (model.features, model.targets):
        raise ValueError(
            f"data has {found[0]} features and {found[1]} targets per example: must have {model.features} and "
            f"{model.targets}, as tables whose label is a number, or a function of your own that returns targets [N, m]"
        )
    return model


def _batches(data: TensorDataset) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features [B, d] and targets [B, m] in float64; slices, where a DataLoader would collate row by row."""
    for rows, targets in zip(*(torch.split(each, BATCH) for each in data.tensors), strict=True):
        yield rows.flatten(1).double(), targets.reshape(len(targets), -1).double()
