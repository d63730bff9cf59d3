from __future__ import annotations

import numpy as np
import pytest
import torch
from method_fakes import BUILDERS, SHAPE, UPLOADS, softmax, tiny_job
from torch import nn

from strategies.distillation.losses import draw_directions
from strategies.distillation.synthesis import View
from strategies.methods.intactofl import ByPixels, IntactOflConfig
from strategies.teacher.ensemble import Ensemble

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
    members = Ensemble.from_uploads(UPLOADS, BUILDERS, nn.Identity(), fold=False)
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
