from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import (
    BUILDERS,
    OTHER,
    SHAPE,
    TINY,
    UPLOADS,
    Book,
    check_resume,
    options_to_try,
    run,
    same,
    softmax,
    tiny_job,
)

from strategies.core.seeds import generator
from strategies.distillation.losses import draw_directions
from strategies.distillation.synthesis import View
from strategies.method import Outcome
from strategies.methods.intactofl import METHOD, ByPixels, IntactOflConfig, fit
from strategies.teacher.augment import Standardize, dequantize
from strategies.teacher.ensemble import Ensemble

SMALL = IntactOflConfig(**{key: value for key, value in TINY.items() if key != "student_lr"} | {"generator_lr": 1e-3})
PREDICTIONS = replace(SMALL, gate="predictions")
SEED = 3  # with it the gate and the plain mean disagree on images of the first epochs


@cache
def usual_of(config: IntactOflConfig) -> tuple[Outcome, Book]:
    book = Book(keep=True)
    return fit(tiny_job(config, seed=SEED), book), book


@pytest.mark.parametrize(("config", "ascending"), [(SMALL, True), (PREDICTIONS, False)])
def test_labels_of_a_batch_ascend_for_the_gate_of_pixels_alone(config: IntactOflConfig, ascending: bool) -> None:
    book = Book(keep=True)
    fit(tiny_job(replace(config, epochs=1, synthesis_batch_size=16), seed=SEED), book)
    labels = book.snapshots[0].appended["labels"].tolist()
    assert (labels == sorted(labels)) is ascending


def test_first_step_of_the_gate_on_predictions_is_adam_s_on_the_cross_entropy_of_the_mixture() -> None:
    snapshot = usual_of(PREDICTIONS)[1].snapshots[0]
    rows = snapshot.appended
    assert len(rows["labels"]) == 6 == SMALL.batch_size + 1  # one batch: the last image joins it
    model = Ensemble.from_uploads(UPLOADS, BUILDERS, torch.nn.Identity(), fold=False)
    opinions = model(Standardize(tiny_job(SMALL, seed=SEED).normalization)(dequantize(rows["images"]))).log_softmax(2)
    torch.testing.assert_close(rows["members"].transpose(0, 1).log_softmax(2), opinions)
    gate = torch.nn.Linear(9, 3)
    for part in gate.parameters():
        torch.nn.init.zeros_(part)
    optimizer = torch.optim.Adam(gate.parameters(), 1e-3)
    shares = gate(torch.cat([*opinions.exp()], dim=1)).softmax(1)
    mixed = torch.einsum("bm,mbc->bc", shares, opinions.exp())
    torch.nn.functional.nll_loss(mixed.log(), rows["labels"]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for name, value in gate.state_dict().items():
        torch.testing.assert_close(snapshot.state["modules"]["student"][name], value, rtol=1e-3, atol=1e-6)


def test_first_step_of_the_gate_on_pixels_is_sgd_s_on_moved_images() -> None:
    snapshot, job = usual_of(SMALL)[1].snapshots[0], tiny_job(SMALL, seed=SEED)
    rows, rng = snapshot.appended, generator(job.seed, "gate", 0)
    order = torch.randperm(6, generator=rng)  # one batch: the last image joins it
    members = Ensemble.from_uploads(UPLOADS, BUILDERS, torch.nn.Identity(), fold=False)
    experts = ByPixels(members, ByPixels.start(job))
    inputs = Standardize(job.normalization)(dequantize(rows["images"][order]))
    images = experts.moved(inputs, 8 / 255, draw_directions(len(inputs), job.num_classes, rng))
    optimizer = torch.optim.SGD(experts.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    experts.loss(members(images), images, rows["labels"][order]).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(experts.parameters(), 10.0)
    optimizer.step()
    for name, value in experts.state_dict().items():
        torch.testing.assert_close(snapshot.state["modules"]["student"][name], value, rtol=1e-5, atol=1e-7)


VARIANTS: dict[str, dict[str, Any]] = {
    "bounded": {"pool_cap": 9, "steps_per_epoch": 1},
    "augmented": {"pool_augmentation": "flip", "bn_weight": 0.0},
    "predictions, augmented": {"gate": "predictions", "pool_augmentation": "flip"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(name: str) -> None:
    check_resume(METHOD, tiny_job(replace(SMALL, **VARIANTS[name])))


INTACT_OTHER: dict[str, Any] = OTHER | {
    "gate": "predictions", "gate_lr": 0.1, "perturbation_size": 0.5, "bn_weight": 0.0, "distinct_weight": 0.0,
}  # fmt: skip


@pytest.fixture
def keep_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the images of the last step, because the best of two is the first, which looks at few options."""
    recipe = IntactOflConfig.recipe
    monkeypatch.setattr(IntactOflConfig, "recipe", lambda config: replace(recipe(config), keep="last"))


@cache
def usual_with_last_images() -> Outcome:
    return run(METHOD, SMALL, seed=SEED)


@pytest.mark.usefixtures("keep_last")
@pytest.mark.parametrize("name", options_to_try(IntactOflConfig))
def test_every_option_changes_the_result(name: str) -> None:
    assert getattr(SMALL, name) != INTACT_OTHER[name]
    assert not same(run(METHOD, replace(SMALL, **{name: INTACT_OTHER[name]}), seed=SEED), usual_with_last_images())


# The gate on pixels, its terms and how it moves images, against numpy.


IMAGES = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
LABELS = torch.tensor([0, 2, 1, 1])
NOTHING = torch.zeros(())


def directions(images: torch.Tensor, seed: int) -> torch.Tensor:
    return draw_directions(len(images), 3, torch.Generator().manual_seed(seed))


def divergence(one: np.ndarray, other: np.ndarray, temperature: float) -> np.ndarray:
    """``KL(sm(one / T) || sm(other / T))`` of each row."""
    p, q = softmax(one / temperature), softmax(other / temperature)
    result: np.ndarray = (p * np.log(p / q)).sum(-1)
    return result


@pytest.fixture
def experts() -> ByPixels:
    members = Ensemble.from_uploads(UPLOADS, BUILDERS, torch.nn.Identity(), fold=False)
    return ByPixels(members, ByPixels.start(tiny_job(IntactOflConfig())))


def test_gate_s_loss_is_the_published_one_as_numpy_has_it(experts: ByPixels) -> None:
    logits = experts._members[0](IMAGES).detach()
    weight, bias = (value.detach().double().numpy() for value in experts.parameters())
    z, mean = logits.double().numpy(), logits.double().numpy().mean(0)
    gate = IMAGES.flatten(1).double().numpy() @ weight.T + bias
    mixed = np.einsum("bm,mbc->bc", gate, z) / 3
    entropy = -np.log(softmax(mixed)[np.arange(4), LABELS]).mean()
    expected = entropy + 0.01 * gate.std(ddof=1) + 16 * divergence(mean, mixed, 4.0).mean()
    assert float(experts.loss(logits, IMAGES, LABELS).detach()) == pytest.approx(expected, rel=1e-4)


def test_generator_s_terms_are_the_published_ones_as_numpy_has_them(experts: ByPixels) -> None:
    logits = experts._members[0](IMAGES).detach()
    view = View(NOTHING, IMAGES, LABELS, logits)
    mixed, mean = experts.mixed(logits, IMAGES).detach().double().numpy(), logits.double().numpy().mean(0)
    differ = mixed.argmax(1) != mean.argmax(1)
    assert differ.sum() > 0
    right, distinct = experts.terms(0.5)
    assert (right.name, right.weight, distinct.name, distinct.weight) == ("ce", 1.0, "distinct", 0.5)
    entropy = -np.log(softmax(mixed)[np.arange(4), LABELS]).mean()
    assert float(right.loss(view).detach()) == pytest.approx(entropy, rel=1e-5)
    expected = -9 * (differ * divergence(mixed, mean, 3.0)).mean()
    assert float(distinct.loss(view).detach()) == pytest.approx(expected, rel=1e-4)


def test_gradient_reaches_the_images_through_the_gate_too(experts: ByPixels) -> None:
    logits = torch.ones(3, 4, 3) * torch.tensor([1.0, 0.0, 0.0])  # no gradient through the experts
    images = IMAGES.clone().requires_grad_()
    right, _ = experts.terms(1.0)
    right.loss(View(NOTHING, images, LABELS, logits)).backward()
    assert bool(images.grad.any())


def test_images_move_by_the_size_exactly_where_the_gradient_is_not_zero(experts: ByPixels) -> None:
    zeros = torch.zeros(4, *SHAPE)
    moved = experts.moved(zeros, 0.25, directions(zeros, 0))
    assert set(moved.unique().tolist()) <= {-0.25, 0.0, 0.25}
    assert float(moved.abs().mean()) > 0.2
    again, other = (experts.moved(zeros, 0.25, directions(zeros, seed)) for seed in (0, 1))
    assert torch.equal(again, moved)
    assert not torch.equal(other, moved)
    assert all(value.grad is None for value in experts._members[0].parameters())
