import math
import pickle
from typing import Any

import pytest
import torch
from method_fakes import Book
from torch import nn

from strategies.distillation.epochs import Stage, learning_rate, run_epochs
from strategies.distillation.pool import Pool
from strategies.method import Job, Normalization


def job(observer: Any = None) -> Job:
    return Job((), {}, "net", 2, (1, 4, 4), Normalization((0.0,), (1.0,)), None, seed=3, observer=observer)


def stage() -> Stage:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Stage({"student": student}, torch.optim.SGD(student.parameters(), 0.1, momentum=0.9), Pool())


def train(one: Stage) -> dict[str, float]:
    images = torch.rand(4, 2, 5, 5)
    one.pool.add(images=images)
    loss = one.modules["student"](images).square().sum()
    one.optimizer.zero_grad()
    loss.backward()
    one.optimizer.step()
    return {"loss": float(loss.detach())}


def test_resume_from_a_snapshot_repeats_only_unfinished_epochs() -> None:
    whole = stage()
    run_epochs(job(), Book(), whole, epochs=4, step=lambda e: train(whole))
    first = stage()
    run_epochs(job(), Book(), first, epochs=2, step=lambda e: train(first))
    snapshot = pickle.loads(pickle.dumps(first.snapshot(2)))  # noqa: S301  our own bytes
    second, progress = stage(), Book(snapshot)
    run_epochs(job(), progress, second, epochs=4, step=lambda e: train(second))
    assert [row["epoch"] for row in progress.rows] == [3, 4]
    for name, value in whole.modules["student"].state_dict().items():
        assert torch.equal(value, second.modules["student"].state_dict()[name]), name
    assert torch.equal(whole.pool.columns["images"], second.pool.columns["images"])


def test_learning_rate_equals_torch_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    for epoch in range(7):
        assert math.isclose(optimizer.param_groups[0]["lr"], learning_rate("cosine", 0.3, epoch, 7), rel_tol=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("epochs", [1, 8])
def test_learning_rate_on_one_cycle_equals_torch_s_but_for_its_last_steps(epochs: int) -> None:
    steps = 4000
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=steps, pct_start=0.1, anneal_strategy="cos"
    )
    ours, theirs = [], []
    for step in range(steps):
        ours.append(learning_rate("one-cycle", 0.3, epochs * step / steps, epochs))
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # Torch counts steps from the first to the last, here they are counted to the end of the last.
    assert ours == pytest.approx(theirs, abs=0.3 * 5 / (0.1 * steps))
    assert ours[0] == pytest.approx(0.3 / 25)
    assert max(ours) == ours[steps // 10] == pytest.approx(0.3)
    assert 0 < ours[-1] < 1e-4 * 0.3
    assert ours[: steps // 10] == sorted(ours[: steps // 10])
    assert ours[steps // 10 :] == sorted(ours[steps // 10 :], reverse=True)
