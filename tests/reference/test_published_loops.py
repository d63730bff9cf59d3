"""The shipped server stages against the published loops, written a second time in plain PyTorch.

Both sides get the same weights and the same draws. The published loop draws in the order of its formulas, from the
random numbers that the shipped code derives for synthesis, reweighting and distillation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from published_loops import (
    PlainGenerator,
    Settings,
    State,
    crop_and_flip,
    ensemble,
    images_gradient,
    run_co_boosting,
    run_dense,
)
from published_models import load_in_order, plain_cnn5, plain_lenet5
from side_by_side import EPOCHS, Case, distance, plain_state, same_draws, shipped_job, shipped_method, shipped_server
from small_federation import accuracy, digits_clients
from torch import Tensor, nn

from fl_app.models import build
from strategies.combiners.combiners import Weighted
from strategies.combiners.outcomes import build_ensemble, load_model
from strategies.core.seeds import generator
from strategies.distillation import generators
from strategies.method import Silent
from strategies.teacher.augment import crop_flip
from strategies.teacher.student import fresh_student

CLOSE = 1e-5
# Two generator steps; pool images as they are made, because one that lies next to a border of 8 bits may round to
# either side.
TINY = Settings(epochs=4, steps=2, batch=12, latent=8, classes=4, eight_bits=False)
METHODS = ("dense", "co-boosting")


def net() -> nn.Module:
    """A smooth model: at the kink of a ReLU, rounding would decide a gradient, and with it the sign of a pixel."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip


def case(method: str, settings: Settings = TINY, seed: int = 0) -> Case:
    return Case(method, (1, 8, 8), net, net, clients=3, settings=settings, seed=seed)


def after_one_epoch(it: Case) -> tuple[Any, State]:
    """Return both sides in the identical state after epoch 0, which the shipped code ran."""
    job = shipped_job(it)
    server = shipped_server(it, job)
    server.epoch(0)
    return server, plain_state(it, server, job)


def tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_from_one_identical_state_ends_in_the_same_student(method: str, augment: bool) -> None:
    it = case(method, replace(TINY, augment=augment))
    server, state = after_one_epoch(it)
    before = [tensor.clone() for tensor in tensors(state.student)]

    losses = server.epoch(1)
    EPOCHS[method](state, it.settings, 1, same_draws(it))

    assert distance(tensors(server.learner.student), tensors(state.student)) < CLOSE
    assert distance(before, tensors(state.student)) > 100 * CLOSE  # the epoch changed it
    assert distance([server.stage.pool.columns["images"]], [state.images]) < CLOSE
    assert torch.equal(server.stage.pool.columns["labels"], state.labels)
    # A sum of terms of opposite signs: rounding, which differs between processors, is as large as in them.
    assert losses["generator"] == pytest.approx(state.losses["generator"], rel=CLOSE, abs=CLOSE)
    assert losses["distillation"] == pytest.approx(state.losses["distillation"], rel=CLOSE)


def test_co_boosting_s_weights_after_an_epoch_equal_the_published_loop_s() -> None:
    it = case("co-boosting", replace(TINY, mu=0.05))
    server, state = after_one_epoch(it)

    server.epoch(1)
    EPOCHS["co-boosting"](state, it.settings, 1, same_draws(it))

    assert state.weights.tolist() == pytest.approx(server.combiner.weights.tolist(), rel=CLOSE)
    assert state.weights.tolist() != pytest.approx([1 / 3] * 3, abs=0.01)  # they moved


def test_the_gradient_of_the_images_equals_the_published_loop_s() -> None:
    it = case("co-boosting")
    server, state = after_one_epoch(it)
    inputs = 2 * state.images - 1
    directions = torch.rand(len(inputs), 4, generator=generator(1)) * 2 - 1

    ours = inputs.clone().requires_grad_()
    (directions * torch.softmax(server.teacher(ours) / 4, dim=1)).sum().backward()  # type: ignore[no-untyped-call]
    theirs = images_gradient(state, it.settings, inputs, directions)

    assert distance([ours.grad], [theirs]) < CLOSE
    assert float((ours.grad.sign() != theirs.sign()).float().mean()) <= 1e-3


def test_generators_of_equal_weights_make_equal_images_and_gradients() -> None:
    server = shipped_server(case("dense"))
    plain = PlainGenerator(8, (1, 8, 8))
    plain.load_state_dict(server.images.generator.state_dict())
    noise, directions = torch.randn(12, 8, generator=generator(2)), torch.randn(12, 1, 8, 8, generator=generator(3))

    for module in (plain, server.images.generator):
        (module(noise) * directions).sum().backward()
    gradients = [[p.grad for p in module.parameters()] for module in (server.images.generator, plain)]

    assert distance([server.images.generator(noise)], [plain(noise)]) < CLOSE
    assert distance(gradients[0], gradients[1]) < CLOSE  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "plain", "shape"), [("cnn5", plain_cnn5, 3), ("lenet5", plain_lenet5, 1)])
def test_the_published_models_equal_the_zoo_s(name: str, plain: Any, shape: int) -> None:
    torch.manual_seed(4)
    shipped = build(name, num_classes=10, input_shape=(shape, 32, 32)).eval()
    images = torch.randn(3, shape, 32, 32)

    assert distance([shipped(images)], [load_in_order(plain(), shipped.state_dict())(images)]) < CLOSE


def test_crop_and_flip_one_image_at_a_time_equals_the_shipped_batch() -> None:
    pixels = torch.rand(9, 2, 8, 8, generator=generator(5))

    assert torch.equal(crop_and_flip(pixels, generator(6)), crop_flip(pixels, generator(6)))


def test_the_ensemble_divides_by_the_sum_of_its_weights() -> None:
    _, state = after_one_epoch(case("co-boosting"))
    inputs, weights = 2 * state.images - 1, [0.3, 0.0, 0.9]
    state.weights = torch.tensor(weights)
    logits = torch.stack([teacher(inputs) for teacher in state.teachers])

    assert distance([ensemble(state, inputs)], [Weighted(weights)(logits)]) < CLOSE


# Whole runs, each side with its own draws: accuracies must agree within the spread of seeds.

SHORT = Settings(epochs=16, steps=6, batch=32, latent=64, wide=32, generator_lr=3e-3, student_lr=0.1, mu=0.02)
SEEDS = (0, 1, 2)
RUNS = {"dense": run_dense, "co-boosting": run_co_boosting}


def lenet() -> nn.Module:
    return build("lenet5", num_classes=10, input_shape=(1, 8, 8))


@pytest.fixture(scope="module")
def clients() -> list[dict[str, Tensor]]:
    return digits_clients(lenet, clients=3, alpha=0.5, seed=0, epochs=30)


@pytest.mark.slow
@pytest.mark.check
@pytest.mark.parametrize("method", METHODS)
def test_whole_runs_reach_the_same_accuracies(
    method: str, clients: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "WIDTH", SHORT.wide)
    theirs: dict[str, list[float]] = {"student": [], "ensemble": []}
    ours: dict[str, list[float]] = {"student": [], "ensemble": []}
    for seed in SEEDS:
        it = Case(method, (1, 8, 8), lenet, lenet, clients=3, settings=SHORT, seed=seed)
        job = shipped_job(it, clients)
        models = [load_in_order(lenet(), upload.read()) for upload in job.uploads]
        state = RUNS[method](models, fresh_student(job), it.shape, it.settings, seed=1000 + seed)
        theirs["student"].append(accuracy(state.student))
        theirs["ensemble"].append(accuracy(lambda x, state=state: ensemble(state, x)))  # type: ignore[misc]
        outcome = shipped_method(method).fit(job, Silent())
        ours["student"].append(accuracy(load_model(outcome, job)))
        if outcome.ensemble is not None:
            ours["ensemble"].append(accuracy(build_ensemble(job, outcome.ensemble)))
    assert ours["student"]
    for name, values in ours.items():
        if values:  # DENSE ends with a student only
            pooled = math.sqrt((stdev(values) ** 2 + stdev(theirs[name]) ** 2) / 2)
            assert abs(fmean(values) - fmean(theirs[name])) <= max(3.0, 2 * pooled), (name, values, theirs[name])
            assert fmean(values) > 30.0  # both learnt something
