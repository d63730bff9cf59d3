"""Tied weights in rounds: one parameter under two names moves as one, and arrays keep the model's order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flower_fakes import CLASSES, ONE_THREAD, SHAPE, Client, FakeGrid
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from torch import nn

from strategies import Iterative, IterativeConfig
from strategies.client import upload_facts
from strategies.client.corrections import LocalUpdate, read_round
from strategies.client.round_state import RoundState
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


def trainer(name: str, seed: int, place: Path) -> Client:
    """A client that trains two steps by the strategy's rules."""
    inputs = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(seed))

    def answer(message: Message) -> Message:
        facts = upload_facts(client=name)
        if message.metadata.message_type == MessageType.QUERY:
            return Message(RecordDict({"upload": facts}), reply_to=message)
        model = Tied()
        update = LocalUpdate(model, *read_round(message), memory=RoundState(place, name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), torch.arange(8) % CLASSES) + update.penalty(model)
            loss.backward()
            optimizer.step()
            update.step(0.1)
        found, metrics = update.finish(model)
        content = RecordDict({key: ArrayRecord(state) for key, state in found.items()})
        content["metrics"], content["upload"] = MetricRecord({"num-examples": 8, **metrics}), facts
        return Message(content, reply_to=message)

    return answer


def iterative(place: Path, name: str = "fedadam") -> Iterative:
    config = IterativeConfig(strategy=name, rounds=2, stc_density=0.2)
    return Iterative(
        Tied, num_classes=CLASSES, input_shape=SHAPE, config=config, run_dir=place / "run", options=ONE_THREAD
    )


@pytest.mark.parametrize("name", TITLES)
def test_tied_weights_move_alike_and_as_the_strategy_moves_them(tmp_path: Path, name: str) -> None:
    strategy, clients = iterative(tmp_path, name), {k: trainer(f"c{k}", k, tmp_path / "disk") for k in (1, 2)}
    state = strategy.start(FakeGrid(clients), start()).arrays.to_torch_state_dict()
    assert not torch.equal(state["one.weight"], start().to_torch_state_dict()["one.weight"])
    assert torch.equal(state["one.weight"], state["two.weight"])
    assert torch.equal(dict(strategy.outcome.state_dict())["one.weight"], state["one.weight"])
