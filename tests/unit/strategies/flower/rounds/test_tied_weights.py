"""Tensors that depend on each other in rounds: one parameter under two names, and vectors of a spectral norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import CLASSES, SHAPE, FakeGrid, strategy
from flwr.app import ArrayRecord
from test_iterative import trainer
from torch import nn

from strategies import Iterative, IterativeConfig
from strategies.flower.rounds.config import TITLES


class Tied(nn.Module):
    """Two layers with one weight, and running statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.two(torch.relu(self.one(self.norm(x.flatten(1)))))))


def start() -> ArrayRecord:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return ArrayRecord(Tied().state_dict())


@pytest.mark.parametrize("name", TITLES)
def test_tied_weights_move_alike_and_as_the_strategy_moves_them(tmp_path: Path, name: str) -> None:
    run: Any = strategy(
        Iterative, tmp_path / "run", model=Tied, config=IterativeConfig(strategy=name, rounds=2, stc_density=0.2)
    )
    clients = {k: trainer(f"c{k}", k, place=tmp_path / "disk", build=Tied) for k in (1, 2)}
    state = run.start(FakeGrid(clients), start()).arrays.to_torch_state_dict()
    assert not torch.equal(state["one.weight"], start().to_torch_state_dict()["one.weight"])
    assert torch.equal(state["one.weight"], state["two.weight"])
    assert torch.equal(dict(run.outcome.state_dict())["one.weight"], state["one.weight"])


class Spectral(nn.Module):
    """A layer whose weight is divided by its spectral norm, in either form of torch."""

    def __init__(self, form: str) -> None:
        super().__init__()
        normed = nn.utils.spectral_norm if form == "old" else nn.utils.parametrizations.spectral_norm
        self.layer, self.head = normed(nn.Linear(64, 64)), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(x.flatten(1))))


@pytest.mark.parametrize("name", ["fedavg", "fedadam"])
@pytest.mark.parametrize("form", ["old", "new"])
def test_a_weight_with_a_spectral_norm_has_norm_1_after_a_round(tmp_path: Path, form: str, name: str) -> None:
    def build() -> nn.Module:
        return Spectral(form)

    run: Any = strategy(Iterative, tmp_path / "run", model=build, config=IterativeConfig(strategy=name, rounds=1))
    clients = {k: trainer(f"c{k}", k, place=tmp_path / "disk", build=build) for k in (1, 2)}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Spectral(form)
    state = run.start(FakeGrid(clients), ArrayRecord(model.state_dict())).arrays.to_torch_state_dict()
    model.load_state_dict(state)
    model.eval()(torch.zeros(1, *SHAPE))  # the old form then writes its weight
    assert np.linalg.norm(model.layer.weight.detach().numpy(), 2) == pytest.approx(1.0, abs=1e-5)
