import numpy as np
import pytest
import torch

from strategies.distillation.losses import (
    adversarial_divergence,
    diversity,
    hard_cross_entropy,
    logit_distance,
    soft_kl,
)

RNG = torch.Generator().manual_seed(0)
A, B = torch.randn(2, 6, 4, generator=RNG)


def test_soft_kl_gradient_of_the_student_is_temperature_times_the_difference_of_probabilities() -> None:
    student = A.clone().requires_grad_()
    soft_kl(student, B, 2.0).backward()  # type: ignore[no-untyped-call]
    expected = 2.0 * ((A / 2).softmax(1) - (B / 2).softmax(1)) / len(A)
    torch.testing.assert_close(student.grad, expected)


def test_logit_distance_is_the_mean_absolute_difference_over_images_and_classes() -> None:
    expected = np.abs(A.numpy() - B.numpy()).sum() / (6 * 4)
    assert float(logit_distance(A, B)) == pytest.approx(expected, rel=1e-6)
    assert float(logit_distance(A, A)) == 0.0
    torch.testing.assert_close(logit_distance(A + 2.0, A), torch.tensor(2.0))


def test_adversarial_divergence_lets_the_gradient_through_both() -> None:
    teacher, student = A.clone().requires_grad_(), B.clone().requires_grad_()
    adversarial_divergence(teacher, student, 3.0).backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is not None
    assert student.grad is not None
    assert float(teacher.grad.abs().sum()) > 0
    assert float(student.grad.abs().sum()) > 0


LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def test_hard_cross_entropy_takes_its_factor_as_a_constant() -> None:
    logits = A.clone().requires_grad_()
    hard_cross_entropy(logits, LABELS, 2.0).backward()  # type: ignore[no-untyped-call]
    p = A.softmax(1)
    factor = (1 - p[torch.arange(6), LABELS]) ** 2
    onehot = torch.nn.functional.one_hot(LABELS, 4)
    torch.testing.assert_close(logits.grad, factor[:, None] * (p - onehot) / 6)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_diversity_is_the_exponential_of_the_mean_over_all_pairs(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(3)
    noise, made = torch.randn(4, 6, generator=draw), torch.randn(4, *shape, generator=draw)
    z, x = noise.numpy(), made.numpy()
    pairs = [np.mean((z[i] - z[j]) ** 2) * np.mean(np.abs(x[i] - x[j])) for i in range(4) for j in range(4)]
    assert float(diversity(noise, made)) == pytest.approx(np.exp(-np.mean(pairs)), rel=1e-6)
    assert float(diversity(noise, made[:1].expand_as(made))) == 1.0


def test_diversity_has_the_gradient_of_the_plain_formula() -> None:
    draw = torch.Generator().manual_seed(4)
    noise, made = torch.randn(4, 6, generator=draw), torch.randn(4, 2, 3, generator=draw).requires_grad_()
    apart = (noise[:, None] - noise).square().mean(2) * (made[:, None] - made).abs().mean((2, 3))
    (wanted,) = torch.autograd.grad(torch.exp(-apart.mean()), made)
    (found,) = torch.autograd.grad(diversity(noise, made), made)
    torch.testing.assert_close(found, wanted)
    closer = made.detach() - 0.1 * found
    assert float(diversity(noise, closer)) < float(diversity(noise, made.detach()))
