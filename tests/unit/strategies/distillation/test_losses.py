import pytest
import torch

from strategies.distillation.losses import adversarial_divergence, cross_entropy, soft_kl

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
