from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from method_fakes import BUILDERS, SHAPE, UPLOADS, tiny_job
from torch import nn

from strategies.combiners.expert_gate import weighed
from strategies.distillation.experts import GATES, ByPixels, experts_cross_entropy
from strategies.distillation.perturbation import drawn_directions
from strategies.distillation.synthesis import View
from strategies.intactofl import IntactOflConfig
from strategies.teacher.ensemble import Ensemble

IMAGES = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
LABELS = torch.tensor([0, 2, 1, 1])
NOTHING = torch.zeros(())


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max(-1, keepdims=True))
    result: np.ndarray = exponentials / exponentials.sum(-1, keepdims=True)
    return result


def directions(images: torch.Tensor, seed: int) -> torch.Tensor:
    return drawn_directions(len(images), 3, torch.Generator().manual_seed(seed))


def divergence(one: np.ndarray, other: np.ndarray, temperature: float) -> np.ndarray:
    """``KL(sm(one / T) || sm(other / T))`` of each row."""
    p, q = softmax(one / temperature), softmax(other / temperature)
    result: np.ndarray = (p * np.log(p / q)).sum(-1)
    return result


@pytest.fixture
def experts() -> ByPixels:
    members = Ensemble.from_uploads(UPLOADS, BUILDERS, nn.Identity(), fold=False)
    return ByPixels(members, ByPixels.start(tiny_job(IntactOflConfig())))


def test_mixture_divides_by_the_number_of_experts() -> None:
    logits = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert weighed(logits, torch.tensor([[2.0, 0.0]])).tolist() == [[1.0, 0.0]]


def test_gate_starts_as_torch_draws_a_linear_layer(experts: ByPixels) -> None:
    weight, bias = (value.detach() for value in experts.parameters())
    pixels = int(np.prod(SHAPE))
    assert (weight.shape, bias.shape) == ((3, pixels), (3,))
    assert 0.9 * pixels**-0.5 < float(weight.abs().max()) <= pixels**-0.5
    assert float(bias.abs().max()) <= pixels**-0.5
    other = ByPixels.start(replace(tiny_job(IntactOflConfig()), seed=1))
    assert not torch.equal(other["weight"], weight)


def test_gate_s_loss_of_a_mixture_by_hand(experts: ByPixels) -> None:
    # The gate's weights are (2, 0) on both images: their standard deviation is 1.15470, and A = (f_1 + 0) = (2, 0).
    gate = ByPixels(experts._members[0], {"weight": torch.zeros(2, 128), "bias": torch.tensor([2.0, 0.0])})
    logits = torch.tensor([[[2.0, 0.0]] * 2, [[-2.0, 0.0]] * 2])  # e = (0, 0)
    found = float(gate.loss(logits, torch.zeros(2, *SHAPE), torch.tensor([0, 0])).detach())
    assert found == pytest.approx(np.log1p(np.exp(-2.0)) + 0.01 * 1.154701 + 0.494877, rel=1e-5)


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
    assert images.grad is not None
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


def test_gate_on_predictions_leaves_images_and_is_blind_to_them() -> None:
    form = GATES["predictions"]
    members = Ensemble.from_uploads(UPLOADS, BUILDERS, nn.Identity(), fold=False)
    experts = form(members, form.start(tiny_job(IntactOflConfig())))
    assert experts.moved(IMAGES, 0.25, directions(IMAGES, 0)) is IMAGES
    logits = members(IMAGES)
    assert torch.equal(experts.mixed(logits, IMAGES), experts.mixed(logits, -IMAGES))


def test_cross_entropy_of_the_experts_is_the_mean_over_experts_and_images() -> None:
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 0, 1, 1, 2])
    shares = softmax(logits.double().numpy())
    expected = -np.mean([np.log(shares[k, i, labels[i]]) for k in range(3) for i in range(5)])
    assert float(experts_cross_entropy(View(NOTHING, NOTHING, labels, logits))) == pytest.approx(expected, rel=1e-5)
