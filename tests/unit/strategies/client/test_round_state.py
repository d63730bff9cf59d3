"""Which version of a client's memory a round builds on: late answers, servers that go back, and lost files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import equal
from torch import nn

from strategies.client.corrections import LocalUpdate
from strategies.client.round_state import RoundState

State = dict[str, torch.Tensor]


def versions(folder: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("alice-state-*"))


def one_round(memory: RoundState, number: int, **told: int) -> tuple[State, dict[str, float]]:
    """Take part in a round of SCAFFOLD and FedDyn; what it ends with depends on all that is remembered."""
    model = nn.Linear(2, 1)
    start = {"weight": torch.tensor([[1.0, -1.0]]), "bias": torch.zeros(1)}
    config: dict[str, Any] = {"server-round": number, "feddyn-alpha": 0.5}
    config |= {key.replace("_", "-"): value for key, value in told.items()}
    control = {"weight": torch.full((1, 2), 0.1), "bias": torch.ones(1)}
    update = LocalUpdate(model, config, {"arrays": start, "control": control}, memory=memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ((model(torch.tensor([[1.0, 2.0]])) - number).square().sum() + update.penalty(model)).backward()
        optimizer.step()
        update.step(0.1)
    records, metrics = update.finish(model)
    return records["arrays"], metrics


def test_the_memory_is_the_sum_of_all_corrections(tmp_path: Path) -> None:
    memory = RoundState(tmp_path / "run", "alice")
    one_round(memory, 1)
    assert memory.recall(2).state.keys() == {"own.weight", "own.bias", "drift.weight", "drift.bias"}


def test_last_round_names_the_version(tmp_path: Path) -> None:
    memory = RoundState(tmp_path, "alice")
    for number in (1, 2, 3):
        memory.save(number, {"x": torch.tensor([float(number)])}, safe_round=1)
    for number in (1, 2, 3):
        found = memory.recall(7, number)
        assert (found.round, found.state["x"].item(), found.restarted) == (number, number, False)
    assert memory.recall(7).round == 3
    assert memory.recall(3).round == 2


def test_server_that_goes_back_to_its_checkpoint_meets_the_same_client(tmp_path: Path) -> None:
    memory = RoundState(tmp_path / "run", "alice")
    # Checkpoints after rounds 2 and 5; killed in round 5.
    told = {1: (0, 0), 2: (1, 0), 3: (2, 2), 4: (3, 2), 5: (4, 2)}
    first = {k: one_round(memory, k, last_round=last, safe_round=safe)[0] for k, (last, safe) in told.items()}
    assert versions(tmp_path / "run") == [2, 4, 5]
    for number in (3, 4, 5):
        last, safe = told[number]
        found, metrics = one_round(memory, number, last_round=last, safe_round=safe)
        assert equal(found, first[number])
        assert metrics["restarted"] == 0.0
    one_round(memory, 6, last_round=5, safe_round=5)
    assert versions(tmp_path / "run") == [5, 6]


@pytest.mark.parametrize("damage", ["gone", "torn", "nowhere"])
def test_lost_state_is_zero_one_warning_and_a_metric(tmp_path: Path, said: list[str], damage: str) -> None:
    memory = RoundState(None if damage == "nowhere" else tmp_path / "run", "alice")
    one_round(memory, 1, last_round=0, safe_round=0)
    if damage != "nowhere":
        (path,) = (tmp_path / "run").glob("*.safetensors")
        path.unlink() if damage == "gone" else path.write_bytes(b"torn")
    found, metrics = one_round(memory, 2, last_round=1, safe_round=1)
    zero, _ = one_round(RoundState(tmp_path / "other", "alice"), 2, last_round=0, safe_round=0)
    assert equal(found, zero)
    assert metrics["restarted"] == 1.0
    zeros = [line for line in said if line.endswith("it continues from zero")]
    assert zeros == ["alice: its state of round 1 is not kept here: it continues from zero"]
    assert memory.recall(2, None).round == 0  # from a server that sends no last round
    assert said[-1] == "alice: no state of earlier rounds is kept here: it continues from zero"
    if damage != "nowhere":  # it has a memory again
        assert one_round(memory, 3, last_round=2, safe_round=1)[1]["restarted"] == 0.0


def test_disk_that_refuses_costs_the_memory_only(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "run").write_text("a file where the folder would be")
    assert one_round(RoundState(tmp_path / "run", "alice"), 1)
    assert any("alice: its state of round 1 is not saved" in line for line in said)
