"""Which version of a client's memory a round builds on: late answers, servers that go back, and lost files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies.client.corrections import LocalUpdate
from strategies.client.round_state import Recalled, RoundState
from strategies.core.errors import UploadError

State = dict[str, torch.Tensor]


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear, logger = Ear(), logging.getLogger("flwr")
    logger.addHandler(ear)
    yield lines
    logger.removeHandler(ear)


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


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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


def test_client_whose_answers_never_counted_begins_at_zero_silently(tmp_path: Path, said: list[str]) -> None:
    memory = RoundState(tmp_path / "run", "alice")
    first, metrics = one_round(memory, 1, last_round=0, safe_round=0)
    assert metrics["restarted"] == 0.0
    # The first answer was late: the round after is as if it had not been given.
    again, metrics = one_round(memory, 2, last_round=0, safe_round=0)
    fresh, _ = one_round(RoundState(tmp_path / "other", "alice"), 2, last_round=0, safe_round=0)
    assert same(again, fresh)
    assert metrics["restarted"] == 0.0
    assert not same(first, again)
    assert said == []


def test_late_answer_has_no_effect(tmp_path: Path) -> None:
    punctual, late = (RoundState(tmp_path / name, "alice") for name in ("punctual", "late"))
    for memory in (punctual, late):
        one_round(memory, 1, last_round=0, safe_round=0)
    one_round(late, 2, last_round=1, safe_round=1)
    wanted, _ = one_round(punctual, 3, last_round=1, safe_round=1)
    assert same(one_round(late, 3, last_round=1, safe_round=1)[0], wanted)
    # Had it counted, the next round were another.
    one_round(punctual, 2, last_round=1, safe_round=1)
    assert not same(one_round(punctual, 3, last_round=2, safe_round=1)[0], wanted)


def test_server_that_goes_back_to_its_checkpoint_meets_the_same_client(tmp_path: Path) -> None:
    memory = RoundState(tmp_path / "run", "alice")
    # Checkpoints after rounds 2 and 5; killed in round 5.
    told = {1: (0, 0), 2: (1, 0), 3: (2, 2), 4: (3, 2), 5: (4, 2)}
    first = {k: one_round(memory, k, last_round=last, safe_round=safe)[0] for k, (last, safe) in told.items()}
    assert versions(tmp_path / "run") == [2, 4, 5]
    for number in (3, 4, 5):
        last, safe = told[number]
        found, metrics = one_round(memory, number, last_round=last, safe_round=safe)
        assert same(found, first[number])
        assert metrics["restarted"] == 0.0
    one_round(memory, 6, last_round=5, safe_round=5)
    assert versions(tmp_path / "run") == [5, 6]


def test_two_versions_are_kept_if_the_server_does_not_tell_which(tmp_path: Path) -> None:
    untold = RoundState(tmp_path, "alice")
    for number in range(1, 7):
        untold.save(number, {"x": torch.zeros(1)})
    assert versions(tmp_path) == [5, 6]


@pytest.mark.parametrize("told", [{"safe_round": 0, "last_round": 0}, {"safe_round": 0}, {"last_round": 0}, {}])
@pytest.mark.parametrize("step", [1, -1])
def test_at_most_three_versions_are_kept_whatever_is_said(tmp_path: Path, told: dict[str, int], step: int) -> None:
    memory = RoundState(tmp_path, "alice")
    # All of its answers are late, or the server counts backwards.
    for number in range(1, 30)[::step]:
        memory.save(number, {"x": torch.zeros(1)}, **told)  # type: ignore[arg-type]
    assert len(versions(tmp_path)) <= 3


def test_a_request_that_comes_late_does_not_remove_the_newest_version(tmp_path: Path) -> None:
    memory = RoundState(tmp_path, "alice")
    for number, last in ((2, 0), (5, 2), (3, 2)):
        memory.save(number, {"x": torch.zeros(1)}, safe_round=2, last_round=last)
    assert versions(tmp_path) == [2, 3, 5]


def test_a_round_below_one_is_refused_because_it_names_a_file(tmp_path: Path) -> None:
    with pytest.raises(UploadError, match="server-round is -3: must be at least 1"):
        one_round(RoundState(tmp_path, "alice"), -3)


def test_at_most_three_versions_lie_on_the_disk_between_two_checkpoints(tmp_path: Path) -> None:
    memory = RoundState(tmp_path / "run", "alice")
    for number, last in ((10, 0), (13, 10), (14, 13), (20, 14)):
        one_round(memory, number, last_round=last, safe_round=0)
    assert versions(tmp_path / "run") == [14, 20]
    # A checkpoint after 20; the answer of 31 is late, so that 24 stays the last.
    for number, last in ((24, 20), (31, 24), (36, 24), (40, 36)):
        one_round(memory, number, last_round=last, safe_round=20)
    assert versions(tmp_path / "run") == [20, 36, 40]
    assert [memory.recall(41, known).restarted for known in (20, 36, 40)] == [False, False, False]


@pytest.mark.parametrize("damage", ["gone", "torn", "nowhere"])
def test_lost_state_is_zero_one_warning_and_a_metric(tmp_path: Path, said: list[str], damage: str) -> None:
    memory = RoundState(None if damage == "nowhere" else tmp_path / "run", "alice")
    one_round(memory, 1, last_round=0, safe_round=0)
    if damage != "nowhere":
        (path,) = (tmp_path / "run").glob("*.safetensors")
        path.unlink() if damage == "gone" else path.write_bytes(b"torn")
    found, metrics = one_round(memory, 2, last_round=1, safe_round=1)
    zero, _ = one_round(RoundState(tmp_path / "other", "alice"), 2, last_round=0, safe_round=0)
    assert same(found, zero)
    assert metrics["restarted"] == 1.0
    zeros = [line for line in said if line.endswith("it continues from zero")]
    assert zeros == ["alice: its state of round 1 is not kept here: it continues from zero"]
    if damage != "nowhere":  # it has a memory again
        assert one_round(memory, 3, last_round=2, safe_round=1)[1]["restarted"] == 0.0


def test_strategies_without_memory_report_no_restart(tmp_path: Path, said: list[str]) -> None:
    model = nn.Linear(2, 1)
    sent = {"arrays": dict(model.state_dict())}
    config = {"server-round": 5, "last-round": 4, "safe-round": 4, "proximal-mu": 0.1}
    update = LocalUpdate(model, config, sent, memory=RoundState(tmp_path / "run", "alice"))
    update.step(0.1)
    assert update.finish(model)[1] == {"travel": 0.1}
    assert said == []
    assert not (tmp_path / "run").exists()


def test_memory_without_a_run_keeps_nothing() -> None:
    memory = RoundState.of("", "", "alice")
    memory.save(1, {"x": torch.ones(1)}, safe_round=0)
    assert memory.recall(2, 0) == Recalled()
    assert memory.recall(2, 1) == Recalled(restarted=True)


def test_a_folder_that_is_closed_to_this_user_holds_no_state_and_ends_no_round(
    tmp_path: Path, close: Callable[[Path], None], said: list[str]
) -> None:
    close(tmp_path)
    memory = RoundState.of(str(tmp_path), "a" * 32, "alice")

    assert memory.recall(2, 1) == Recalled(restarted=True)
    assert memory.recall(2) == Recalled()
    memory.save(2, {"drift": torch.zeros(1)})

    assert "state of round 2 is not saved: [Errno 13] Permission denied" in said[-1]
