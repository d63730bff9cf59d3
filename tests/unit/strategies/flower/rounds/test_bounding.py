"""The bounds on one client in a round: a huge answer moves no strategy far, and honest runs keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import Client, FakeGrid, equal, spoilt, strategy, weights
from flwr.app import Array, ArrayRecord, RecordDict
from test_iterative import trainer

from strategies import Iterative, IterativeConfig
from strategies.core import bounds

State = dict[str, torch.Tensor]
NAMES = ("alice", "bob", "carol", "dave")


def run(place: Path, name: str, *, mallory: Callable[[RecordDict], object] = lambda content: None) -> State:
    """Return the model after two rounds; mallory spoils his answers."""
    clients: dict[int, Client] = {
        number: trainer(client, 1, place=place / "disk", examples=8 + number)
        for number, client in enumerate(NAMES, start=1)
    }
    last = spoilt(trainer("mallory", 1, place=place / "disk"), mallory)
    config = IterativeConfig(strategy=name, rounds=2, stc_density=0.2)
    grid: Any = FakeGrid({**clients, 9: last})
    result = strategy(Iterative, place / "run", config=config).start(grid, ArrayRecord(weights(5)))
    return dict(result.arrays.to_torch_state_dict())


@cache
def clean(name: str) -> State:
    """Return the model of a run in which everybody is honest."""
    with TemporaryDirectory() as place:
        return run(Path(place), name)


def huge(content: RecordDict) -> None:
    """Move parameters, statistics and records of changes by 1e12, and shorten the travel as much."""
    for name, record in content.array_records.items():
        content[name] = ArrayRecord({key: Array(_far(key, array.numpy())) for key, array in record.items()})
    metrics = next(iter(content.metric_records.values()))
    if "travel" in metrics:
        metrics["travel"] = 1e-12


def _far(key: str, value: np.ndarray) -> np.ndarray:
    return value + value.dtype.type(1e12) if value.dtype.kind == "f" and key != "bits" else value


def distance(one: State, other: State) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def lying(travel: float) -> Callable[[RecordDict], object]:
    """Return what changes an answer's travel."""
    return lambda content: next(iter(content.metric_records.values())).update({"travel": travel})


@pytest.mark.parametrize(
    ("name", "spoil", "line"),
    [
        *((name, huge, "mallory's change in round 1 is") for name in ("fednova", "scaffold", "stc")),
        ("fednova", lying(1e-30), ""),
        ("fednova", lying(1e30), ""),
    ],
    ids=["fednova", "scaffold", "stc", "short travel", "long travel"],
)
def test_one_huge_answer_of_five_moves_the_model_no_further_than_the_bound(
    tmp_path: Path, name: str, spoil: Callable[[RecordDict], object], line: str, said: list[str]
) -> None:
    found = run(tmp_path / "struck", name, mallory=spoil)

    assert all(bool(value.isfinite().all()) for value in found.values())
    assert distance(clean(name), found) < 20
    assert any(each.startswith(line) for each in said)


@pytest.mark.parametrize("travel", [1e45, 1e300, 10**400, 1e-31, 1e-300, 1e-310], ids=lambda travel: f"{travel}"[:6])
def test_travel_that_no_client_goes_costs_its_sender_alone(tmp_path: Path, travel: float, said: list[str]) -> None:
    found = run(tmp_path / "struck", "fednova", mallory=lying(travel))

    heard = "0.0" if travel == 1e-310 else "1"  # a subnormal number is zero to the server
    assert distance(clean("fednova"), found) < 0.3
    refused = [line for line in said if f"metrics['travel'] is {heard}" in line]
    assert any("must be a positive number from 1e-30 to 1e+30" in line for line in refused)


@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold"])
def test_honest_run_has_the_same_bits_without_bounds(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = clean(name)
    monkeypatch.setattr(bounds, "FEWEST", 99)

    assert equal(bounded, run(tmp_path / "free", name))
