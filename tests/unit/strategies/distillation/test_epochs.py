import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.seeds import derive_seed
from strategies.distillation.epochs import Stage, learning_rate, run_epochs, weights_of
from strategies.distillation.pool import Pool
from strategies.method import Job, Normalization, Silent, Snapshot
from strategies.teacher.student import frozen, observe


class Recorder(Silent):
    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot, self.rows, self.steps = snapshot, list[Mapping[str, Any]](), list[int]()

    def resume(self) -> Snapshot | None:
        return self.snapshot

    def record(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, *_: object) -> None:  # noqa: ARG002
        self.steps.append(step)


def job(observer: Any = None) -> Job:
    return Job((), {}, "net", 2, (1, 4, 4), Normalization((0.0,), (1.0,)), None, seed=3, observer=observer)


def stage() -> Stage:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Stage({"student": student}, torch.optim.SGD(student.parameters(), 0.1, momentum=0.9), Pool())


def test_steps_of_an_epoch_are_expected_as_many_as_told_or_as_the_epochs_before_let_expect() -> None:
    class Steps(Silent):
        told: tuple[int, int] = (0, 0)

        def report(self, *facts: Any) -> None:
            self.told = facts[3]

    def last(steps: int, *, of: int = 0) -> tuple[int, int]:
        tick = one.ticks(progress, 0, 9, of=of)
        for _ in range(steps):
            tick()
        return progress.told

    one, progress = stage(), Steps()
    assert last(3) == (3, 0)  # nothing is known in the first epoch
    assert last(2) == (2, 3)
    one.steps[-1] = 5  # an epoch of two steps more than the one before
    assert last(4) == (4, 7)
    assert last(3, of=8) == (3, 8)
    assert last(9, of=8) == (9, 9)


def train(one: Stage) -> dict[str, float]:
    images = torch.rand(4, 2, 5, 5)
    one.pool.add(images=images)
    loss = one.modules["student"](images).square().sum()
    one.optimizer.zero_grad()
    loss.backward()
    one.optimizer.step()
    return {"loss": float(loss.detach())}


def test_run_epochs_records_and_reports_each_epoch() -> None:
    progress = Recorder()
    run_epochs(
        job(lambda epoch, module: {"accuracy": float(epoch)}), progress, stage(), epochs=2, step=lambda e: {"x": e}
    )
    assert progress.rows == [{"epoch": 1, "x": 0, "accuracy": 1.0}, {"epoch": 2, "x": 1, "accuracy": 2.0}]
    assert progress.steps == [1, 2]


def test_resume_from_a_snapshot_repeats_only_unfinished_epochs() -> None:
    whole = stage()
    run_epochs(job(), Recorder(), whole, epochs=4, step=lambda e: train(whole))
    first = stage()
    run_epochs(job(), Recorder(), first, epochs=2, step=lambda e: train(first))
    snapshot = pickle.loads(pickle.dumps(first.snapshot(2)))  # noqa: S301  our own bytes
    second, progress = stage(), Recorder(snapshot)
    run_epochs(job(), progress, second, epochs=4, step=lambda e: train(second))
    assert [row["epoch"] for row in progress.rows] == [3, 4]
    for name, value in whole.modules["student"].state_dict().items():
        assert torch.equal(value, second.modules["student"].state_dict()[name]), name
    assert torch.equal(whole.pool.columns["images"], second.pool.columns["images"])


def test_snapshot_holds_copies_and_only_new_rows() -> None:
    one = stage()
    train(one)
    snapshot = one.snapshot(1)
    weight = snapshot.state["modules"]["student"]["0.weight"].clone()
    momentum = snapshot.state["optimizer"]["parameters"][0]["momentum_buffer"].clone()
    train(one)
    assert torch.equal(snapshot.state["modules"]["student"]["0.weight"], weight)
    assert torch.equal(snapshot.state["optimizer"]["parameters"][0]["momentum_buffer"], momentum)
    assert len(one.snapshot(2).appended["images"]) == 4


def test_restored_optimizer_state_has_the_layout_of_its_parameter() -> None:
    one = stage()
    train(one)
    two = stage()
    two.restore(one.snapshot(1))
    parameter = next(two.modules["student"].parameters())
    assert two.optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()


def test_restored_adam_goes_on_with_the_same_bits() -> None:
    def adam() -> Stage:
        one = stage()
        return replace(one, optimizer=torch.optim.Adam(one.modules["student"].parameters(), 0.1), pool=Pool())

    torch.manual_seed(4)
    one, two = adam(), adam()
    train(one)
    train(one)
    two.restore(pickle.loads(pickle.dumps(one.snapshot(2))))  # noqa: S301  our own bytes
    for last in (one, two):
        torch.manual_seed(5)
        train(last)
    for name, value in one.modules["student"].state_dict().items():
        assert torch.equal(value, two.modules["student"].state_dict()[name]), name


def test_sample_is_of_the_newest_images_and_in_bytes() -> None:
    one = replace(stage(), made=100)
    assert one.sample() is None
    one.pool.add(images=torch.linspace(0, 1, 200).view(-1, 1, 1, 1))
    images = one.sample()
    assert images is not None
    assert images.dtype == torch.uint8
    assert images.shape == (64, 1, 1, 1)
    assert (int(images[0]), int(images[-1])) == (int(255 * 100 / 199), 255)


@pytest.mark.parametrize("scale", [1.0, 255.0], ids=["float32", "uint8"])
def test_sample_of_a_number_is_of_the_last_images_as_they_are(scale: float) -> None:
    one, images = stage(), (scale * torch.rand(90, 1, 2, 2)).to(torch.uint8 if scale > 1 else torch.float32)
    one.pool.add(images=images)
    last, all_of_them = one.sample(70), one.sample(1000)
    assert last is not None
    assert all_of_them is not None
    assert torch.equal(last, images[20:])
    assert torch.equal(all_of_them, images)


def test_step_draws_from_a_state_of_its_own_and_the_global_one_stays() -> None:
    draws: list[float] = []
    one = stage()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    run_epochs(job(), Recorder(), one, epochs=2, step=lambda e: draws.append(float(torch.rand(()))) or {})  # type: ignore[func-returns-value]
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.Generator().manual_seed(derive_seed(3, "epoch", 1))
    assert draws[1] == float(torch.rand((), generator=expected))


def test_observer_runs_in_eval_mode_without_gradients_and_leaves_no_trace() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2).eval())
    seen: list[tuple[int, bool, bool]] = []

    def observer(epoch: int, model: nn.Module) -> dict[str, float]:
        seen.append((epoch, model.training, torch.is_grad_enabled()))
        torch.rand(3)
        return {"accuracy": 0.5}

    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert observe(job(observer), 7, module) == {"accuracy": 0.5}
    assert seen == [(7, False, False)]
    assert [part.training for part in module.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), before)
    assert observe(job(), 7, module) == {}


@pytest.mark.parametrize(("epoch", "expected"), [(0, 0.1), (5, 0.05), (10, 0.0)])
def test_learning_rate_on_a_cosine_goes_from_its_start_to_zero(epoch: int, expected: float) -> None:
    assert learning_rate("cosine", 0.1, epoch, 10) == pytest.approx(expected, abs=1e-9)
    assert learning_rate("constant", 0.1, epoch, 10) == 0.1


def test_learning_rate_equals_torch_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    for epoch in range(7):
        assert math.isclose(optimizer.param_groups[0]["lr"], learning_rate("cosine", 0.3, epoch, 7), rel_tol=1e-9)
        optimizer.step()
        scheduler.step()


def test_learning_rate_on_a_cosine_is_the_same_in_all_steps_of_an_epoch() -> None:
    assert learning_rate("cosine", 0.1, 3.999, 10) == learning_rate("cosine", 0.1, 3, 10)
    assert learning_rate("constant", 0.1, 3.999, 10) == 0.1


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


def test_weights_of_are_contiguous_copies() -> None:
    one = stage().modules["student"]
    weights = weights_of(one)
    assert weights["0.weight"].is_contiguous()
    with frozen(one), torch.no_grad():
        one[0].weight.zero_()  # type: ignore[index]
    assert weights["0.weight"].any()
