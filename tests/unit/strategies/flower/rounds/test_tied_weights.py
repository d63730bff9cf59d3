"""Tied weights in rounds: one parameter under two names moves as one, and arrays keep the model's order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flower_fakes import CLASSES, ONE_THREAD, SHAPE, FakeGrid
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


def iterative(place: Path, name: str = "fedadam") -> Iterative:
    config = IterativeConfig(strategy=name, rounds=2, stc_density=0.2)
    return Iterative(
        Tied, num_classes=CLASSES, input_shape=SHAPE, config=config, run_dir=place / "run", options=ONE_THREAD
    )


@pytest.mark.parametrize("name", TITLES)
def test_tied_weights_move_alike_and_as_the_strategy_moves_them(tmp_path: Path, name: str) -> None:
    strategy, clients = (
        iterative(tmp_path, name),
        {k: trainer(f"c{k}", k, place=tmp_path / "disk", build=Tied) for k in (1, 2)},
    )
    state = strategy.start(FakeGrid(clients), start()).arrays.to_torch_state_dict()
    assert not torch.equal(state["one.weight"], start().to_torch_state_dict()["one.weight"])
    assert torch.equal(state["one.weight"], state["two.weight"])
    assert torch.equal(dict(strategy.outcome.state_dict())["one.weight"], state["one.weight"])
