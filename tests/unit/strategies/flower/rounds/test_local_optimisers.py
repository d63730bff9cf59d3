"""FedProx, FedDyn and SCAFFOLD, both halves, on problems whose answers are known: by hand, and in the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import Client, FakeGrid, failing, strategy, trains_in_rounds
from flwr.app import ArrayRecord, Message
from torch import nn

from strategies import Iterative, IterativeConfig
from strategies.client.corrections import LocalUpdate
from strategies.client.round_state import RoundState
from strategies.flower.rounds.algorithms import FedDyn
from strategies.flower.rounds.base import Base, configured_base


class Point(nn.Module):
    """A model of two weights; its outputs do not matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.w.expand(len(images), 2)


def quadratic(
    name: str, curve: Any, target: Any, *, steps: int, rate: float, place: Path, absent: Sequence[int] = ()
) -> Client:
    """A client whose loss is ``curve / 2 (w - target)^2``, summed over both weights; in some rounds it is away."""
    bend, goal = torch.as_tensor(curve, dtype=torch.float32), torch.as_tensor(target, dtype=torch.float32)

    def loss_of(model: nn.Module, update: LocalUpdate) -> torch.Tensor:
        return (bend / 2 * (model.get_parameter("w") - goal).square()).sum() + update.penalty(model)

    trains = trains_in_rounds(name, Point, loss_of, steps=steps, rate=rate, place=place)

    def answer(message: Message) -> Message | None:
        away = message.content["config"].get("server-round") in absent
        return (failing("away") if away else trains)(message)

    return answer


def end_of(run_dir: Path, clients: Sequence[Client], *, base: Base | None = None, **settings: Any) -> list[float]:
    """Return the weights after the last round; the first begins at 0."""
    config = IterativeConfig(**{"checkpoint_every": 1000, **settings})
    shape = {"num_classes": 2, "input_shape": (1, 1, 1), "min_uploads": 1}
    run: Any = strategy(Iterative, run_dir, model=Point, config=config, base=base, **shape)
    result = run.start(FakeGrid(dict(enumerate(clients, start=1))), ArrayRecord({"w": torch.zeros(2)}))
    return [float(value) for value in result.arrays.to_torch_state_dict()["w"]]


# By hand: alice has 1/2 (w - 4)^2, bob w^2; both take two steps of 1/4. All numbers are sums of powers of 2.


def alice_and_bob(place: Path, *, alice: Sequence[int] = (), bob: Sequence[int] = ()) -> list[Client]:
    return [
        quadratic("alice", 1.0, 4.0, steps=2, rate=0.25, place=place, absent=alice),
        quadratic("bob", 2.0, 0.0, steps=2, rate=0.25, place=place, absent=bob),
    ]


PROX, DYN, SCAFFOLD = ({"strategy": name} for name in ("fedprox", "feddyn", "scaffold"))
# Settings, rounds, who is away when; the model's weight, and what alice and bob keep.
BY_HAND: list[tuple[dict[str, Any], int, dict[str, list[int]], float, tuple[float, ...]]] = [
    # alice 0, 1, 1.5 (gradients -4; -3 + 1), bob stays at 0.
    (PROX, 1, {}, 0.75, ()),
    # alice 0.75, 1.5625, 1.96875; bob 0.75, 0.375, 0.28125.
    (PROX, 2, {}, 1.125, ()),
    # As FedProx, for h is 0: mean 0.75, and mean_h 0.75 on it.
    (DYN, 1, {}, 1.5, (1.5, 0.0)),
    # alice follows 2 w - 4: 1.5, 1.75, 1.875. bob follows 3 w - 1.5: 1.5, 0.75, 0.5625. 1.21875 + 0.46875.
    (DYN, 2, {}, 1.6875, (1.875, -0.9375)),
    # alice alone ends at 1.875; mean_h = 0.75 + 0.375 / 2, the next model 1.875 + 0.9375 = 2.8125.
    (DYN, 2, {"bob": [2]}, 2.8125, (1.875, 0.0)),
    # alice follows 2 w - 4.9375: 2.640625, 2.5546875. bob's h is still 0, 3 w - 2.8125: 1.40625, 1.0546875.
    (DYN, 3, {"bob": [2]}, 1.734375, (1.6171875, -1.7578125)),
    # alice 0, 1, 1.75; bob stays at 0. c_i = -(y_i - x) / 0.5; c is their mean, -1.75.
    (SCAFFOLD, 1, {}, 0.875, (-3.5, 0.0)),
    # alice follows w - 2.25: 0.875, 1.21875, 1.4765625. bob follows 2 w - 1.75 and stays at 0.875.
    (SCAFFOLD, 2, {}, 1.17578125, (-2.953125, 1.75)),
    # Round 2: bob alone stays at 0.875; c = -1.75 + 1.75 / 2. alice's c_i is still -3.5.
    # Round 3: alice follows w - 1.375: 1, 1.09375. bob follows 2 w - 2.625: 1.09375, 1.203125.
    (SCAFFOLD, 3, {"alice": [2]}, 1.1484375, ()),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "rounds", "away", "wanted", "kept"), BY_HAND)
def test_rounds_by_hand(
    tmp_path: Path, settings: dict[str, Any], rounds: int, away: Any, wanted: float, kept: tuple[float, ...]
) -> None:
    base = configured_base(IterativeConfig(**settings, mu=1.0, dyn_alpha=1.0))

    both = end_of(tmp_path / "run", alice_and_bob(tmp_path / "disk", **away), rounds=rounds, base=base, **settings)

    assert both == [wanted, wanted]
    key = "drift.w" if settings is DYN else "own.w"
    for name, value in zip(("alice", "bob"), kept, strict=bool(kept)):
        assert float(RoundState(tmp_path / "disk", name).before(99)[1].get(key, torch.zeros(1))[0]) == value
    if isinstance(base.strategy, FedDyn):
        assert base.strategy.mean_drift["w"].tolist() == [sum(kept) / 2] * 2


# In the limit: clients that want different things, bend differently and take 2, 10 and 5 steps.

CURVES = np.array([[1.0, 3.0], [4.0, 0.5], [2.0, 1.0]])
TARGETS = np.array([[-1.0, 0.0], [2.0, 4.0], [0.5, -3.0]])
STEPS = (2, 10, 5)
OPTIMUM = (CURVES * TARGETS).sum(0) / CURVES.sum(0)


def unlike(place: Path, *, absent: bool) -> list[Client]:
    """The clients; where they are absent, each is so in one of three rounds."""
    rounds = range(1, 100)
    return [
        quadratic(
            f"client-{k}", CURVES[k], TARGETS[k], steps=STEPS[k], rate=0.1, place=place,
            absent=[number for number in rounds if absent and number % 3 == k],
        )
        for k in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{"strategy": "scaffold"}, {"strategy": "feddyn", "dyn_alpha": 2.0}])
def test_corrections_reach_the_optimum_where_fedavg_stalls(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Each client is away in every third round."""
    found = end_of(tmp_path / "run", unlike(tmp_path / "disk", absent=True), rounds=24, **settings)
    np.testing.assert_allclose(found, OPTIMUM, atol=1e-3)
