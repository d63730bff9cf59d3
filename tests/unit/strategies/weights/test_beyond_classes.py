"""Models that are no classifiers, trained by two clients from one start and merged."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from strategies import merge

Pairs = tuple[Tensor, Tensor]


class UNet(nn.Module):
    """One step down and up, with a skip connection and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
        )
        self.up = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.down(images)
        return self.up(torch.cat([seen, self.deep(seen)], dim=1))  # type: ignore[no-any-return]


def squares(seed: int, count: int = 24) -> Pairs:
    """Bright squares on noise, and their masks; clients differ in where their squares lie."""
    rng = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, 1, 16, 16)
    for mask in masks:
        x, y = torch.randint(0, 6, (2,), generator=rng).tolist()
        mask[0, x + 4 * (seed % 2) : x + 6 + 4 * (seed % 2), y : y + 6] = 1.0
    return masks + 0.5 * torch.randn(masks.shape, generator=rng), masks


def dice(model: nn.Module, pairs: Pairs) -> float:
    found = model(pairs[0]) > 0
    return float(2 * (found * pairs[1]).sum() / (found.sum() + pairs[1].sum()))


def diabetes(seed: int) -> Pairs:
    rows, targets = load_diabetes(return_X_y=True)
    part = torch.arange(seed % 3, len(rows), 3)
    return torch.tensor(rows).float()[part] * 20, torch.tensor(targets).float()[part, None] / 100 - 1.5


def r_squared(model: nn.Module, pairs: Pairs) -> float:
    residual = (model(pairs[0]) - pairs[1]).square().sum()
    return float(1 - residual / (pairs[1] - pairs[1].mean()).square().sum())


def labels(seed: int) -> Pairs:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(120, 6, generator=rng)
    return rows, torch.stack([rows[:, 0] > 0, rows[:, 1] + rows[:, 2] > 0, rows[:, 3] < 0.5], dim=1).float()


def exact_share(model: nn.Module, pairs: Pairs) -> float:
    return float(((model(pairs[0]) > 0) == pairs[1].bool()).float().mean())


def trained(model: nn.Module, pairs: Pairs, loss: nn.Module, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(pairs[0]), pairs[1]).backward()
        optimizer.step()
    return model.eval()


CASES = {
    "segmentation": (UNet, squares, nn.BCEWithLogitsLoss(), dice, 0.7),
    "regression": (partial(nn.Linear, 10, 1), diabetes, nn.MSELoss(), r_squared, 0.35),
    "multi-label": (partial(nn.Linear, 6, 3), labels, nn.BCEWithLogitsLoss(), exact_share, 0.85),
}


@pytest.mark.parametrize("method", ["fedavg", "ties"])
@pytest.mark.parametrize("case", CASES)
def test_a_model_without_classes_is_merged_and_works(case: str, method: str) -> None:
    build, examples, loss, score, least = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = trained(build(), examples(0), loss, 60)
        models = [trained(copy.deepcopy(base).train(), examples(seed), loss, 30) for seed in (1, 2)]
    result = merge(models, method, start=base, log=str)
    assert result.student is not None
    with torch.no_grad():
        assert score(result.student, examples(3)) > least
