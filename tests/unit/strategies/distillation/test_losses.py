import numpy as np
import pytest
import torch

from strategies.distillation.losses import (
    adversarial_divergence,
    cross_entropy,
    diversity,
    hard_cross_entropy,
    information,
    jensen_shannon,
    logit_distance,
    soft_kl,
    total_variation,
)

RNG = torch.Generator().manual_seed(0)
A, B = torch.randn(2, 6, 4, generator=RNG)


@pytest.mark.parametrize("temperature", [1.0, 4.0, 20.0])
def test_soft_kl_of_equal_logits_is_zero_and_of_others_positive(temperature: float) -> None:
    assert float(soft_kl(A, A, temperature)) == pytest.approx(0.0, abs=1e-6)
    assert float(soft_kl(A, B, temperature)) > 0.01


def test_soft_kl_ignores_a_constant_added_to_all_logits() -> None:
    torch.testing.assert_close(soft_kl(A + 3.0, B - 2.0, 2.0), soft_kl(A, B, 2.0))


def test_soft_kl_equals_torch_kl_div() -> None:
    expected = 9 * torch.nn.functional.kl_div((A / 3).log_softmax(1), (B / 3).softmax(1), reduction="batchmean")
    torch.testing.assert_close(soft_kl(A, B, 3.0), expected)


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


def test_logit_distance_pulls_every_logit_with_the_same_force() -> None:
    student = A.clone().requires_grad_()
    logit_distance(student, B).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(student.grad, (A - B).sign() / 24)


def test_adversarial_divergence_where_both_agree_is_zero() -> None:
    assert float(adversarial_divergence(A, 0.1 * A)) == 0.0


def test_adversarial_divergence_counts_only_disagreement_over_the_whole_batch() -> None:
    teacher = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    student = torch.tensor([[0.0, 2.0], [1.0, 0.0]])  # disagrees on the first image only
    expected = -soft_kl(student[:1], teacher[:1]) / 2
    torch.testing.assert_close(adversarial_divergence(teacher, student), expected)


def test_adversarial_divergence_lets_the_gradient_through_both() -> None:
    teacher, student = A.clone().requires_grad_(), B.clone().requires_grad_()
    adversarial_divergence(teacher, student, 3.0).backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is not None
    assert student.grad is not None
    assert float(teacher.grad.abs().sum()) > 0
    assert float(student.grad.abs().sum()) > 0


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_the_number_of_classes() -> None:
    loss = cross_entropy(torch.zeros(3, 10), torch.tensor([0, 4, 9]))
    torch.testing.assert_close(loss, torch.tensor(10.0).log())


LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def test_hard_cross_entropy_with_exponent_zero_is_cross_entropy_and_otherwise_less() -> None:
    torch.testing.assert_close(hard_cross_entropy(A, LABELS, 0.0), cross_entropy(A, LABELS))
    values = [float(hard_cross_entropy(A, LABELS, exponent)) for exponent in (0.0, 1.0, 2.0)]
    assert values == sorted(values, reverse=True)
    assert values[2] < values[0]


def test_hard_cross_entropy_of_a_sure_ensemble_is_finite_and_zero() -> None:
    sure = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = hard_cross_entropy(sure, torch.tensor([0]), 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert sure.grad is not None
    assert bool(sure.grad.isfinite().all())


def test_hard_cross_entropy_takes_its_factor_as_a_constant() -> None:
    logits = A.clone().requires_grad_()
    hard_cross_entropy(logits, LABELS, 2.0).backward()  # type: ignore[no-untyped-call]
    p = A.softmax(1)
    factor = (1 - p[torch.arange(6), LABELS]) ** 2
    onehot = torch.nn.functional.one_hot(LABELS, 4)
    torch.testing.assert_close(logits.grad, factor[:, None] * (p - onehot) / 6)


def test_information_is_least_for_equally_frequent_classes_and_zero_for_a_single_one() -> None:
    balanced = 100 * torch.eye(4)
    torch.testing.assert_close(information(balanced), -torch.tensor(4.0).log10())
    assert float(information(balanced[:1].repeat(5, 1))) == pytest.approx(0.0, abs=1e-30)
    assert -0.60206 < float(information(A)) < 0


def test_information_of_a_class_that_never_occurs_has_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, -1e4], [1.0, -1e4]], requires_grad=True)
    information(logits).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_jensen_shannon_is_zero_for_equals_positive_for_others_and_symmetric() -> None:
    assert float(jensen_shannon(A, A)) == pytest.approx(0.0, abs=1e-7)
    assert float(jensen_shannon(A, B)) > 0.001
    torch.testing.assert_close(jensen_shannon(A, B, 2.0), jensen_shannon(B, A, 2.0))


def test_total_variation_of_a_flat_image_is_zero_and_ignores_brightness_and_mirrors() -> None:
    images = torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(1))
    assert float(total_variation(torch.ones(2, 3, 5, 4))) == 0.0
    torch.testing.assert_close(total_variation(images + 0.5), total_variation(images))
    torch.testing.assert_close(total_variation(images.flip(3)), total_variation(images))
    torch.testing.assert_close(total_variation(2 * images), 2 * total_variation(images))


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
