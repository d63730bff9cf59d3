"""The losses on members that are weighed sample by sample, against their formulas in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from strategies.combiners.combiners import Weighted
from strategies.core.seeds import generator as rng
from strategies.distillation.consensus import Lesson, discrepancy, weighted_cross_entropy
from strategies.teacher.ensemble import Ensemble

M, B, C = 3, 5, 4
STUDENT = torch.randn(B, C, generator=rng(0), dtype=torch.float64)
MEMBERS = 2 * torch.randn(M, B, C, generator=rng(1), dtype=torch.float64)
LABELS = torch.randint(C, (B,), generator=rng(2))
RAW = torch.rand(M, B, generator=rng(3), dtype=torch.float64)
WEIGHTS = RAW / RAW.sum(0)


class Constant(nn.Module):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == len(self.logits)
        return self.logits


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def kl(first: np.ndarray, second: np.ndarray) -> float:
    return float((first * np.log(first / second)).sum())


s, f, y, a = STUDENT.numpy(), MEMBERS.numpy(), LABELS.numpy(), WEIGHTS.numpy()


def test_discrepancy_of_logits_is_the_weighted_mean_absolute_difference() -> None:
    wanted = np.mean([sum(a[k, i] * np.abs(s[i] - f[k, i]).mean() for k in range(M)) for i in range(B)])
    assert float(discrepancy(STUDENT, MEMBERS, WEIGHTS, "logits")) == pytest.approx(wanted, rel=1e-12)


def test_discrepancy_by_kl_has_the_student_first() -> None:
    wanted = np.mean([sum(a[k, i] * kl(softmax(s[i]), softmax(f[k, i])) for k in range(M)) for i in range(B)])
    assert float(discrepancy(STUDENT, MEMBERS, WEIGHTS, "kl")) == pytest.approx(wanted, rel=1e-12)


def test_discrepancy_by_squares_is_the_weighted_mean_over_classes() -> None:
    wanted = np.mean([sum(a[k, i] * ((s[i] - f[k, i]) ** 2).mean() for k in range(M)) for i in range(B)])
    assert float(discrepancy(STUDENT, MEMBERS, WEIGHTS, "mse")) == pytest.approx(wanted, rel=1e-12)
    lesson = Lesson.of(MEMBERS, WEIGHTS, mean="probabilities", direction="mse", per_class=True)
    assert float(lesson.loss(STUDENT)) == pytest.approx(wanted, rel=1e-12)


def losses() -> np.ndarray:
    return np.array([[-np.log(softmax(f[k, i])[y[i]]) for i in range(B)] for k in range(M)])


def test_cross_entropy_weighs_each_sample_or_the_mean_of_the_batch() -> None:
    each = np.mean([sum(a[k, i] * losses()[k, i] for k in range(M)) for i in range(B)])
    together = sum(losses()[k].mean() * a[k].mean() for k in range(M))
    assert float(weighted_cross_entropy(MEMBERS, LABELS, WEIGHTS, "per-sample")) == pytest.approx(each, rel=1e-12)
    assert float(weighted_cross_entropy(MEMBERS, LABELS, WEIGHTS, "batch-mean")) == pytest.approx(together, rel=1e-12)
    assert abs(each - together) > 1e-3
    one = weighted_cross_entropy(MEMBERS[1:2], LABELS, WEIGHTS[1:2], "batch-mean")
    assert float(one) == pytest.approx(losses()[1].mean() * a[1].mean(), rel=1e-12)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("direction", ["teacher-first", "student-first"])
@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_lesson_is_the_weighted_kl_in_its_direction(mean: str, direction: str, per_class: bool) -> None:
    def one(i: int) -> float:
        if mean == "logits":
            pairs = [(1.0, softmax(sum(a[k, i] * f[k, i] for k in range(M))))]
        else:
            pairs = [(a[k, i], softmax(f[k, i])) for k in range(M)]
        own = softmax(s[i])
        return float(sum(w * (kl(p, own) if direction == "teacher-first" else kl(own, p)) for w, p in pairs))

    wanted = np.mean([one(i) for i in range(B)]) / (C if per_class else 1)
    lesson = Lesson.of(MEMBERS, WEIGHTS, mean=mean, direction=direction, per_class=per_class)
    assert float(lesson.loss(STUDENT)) == pytest.approx(wanted, rel=1e-12)


def test_lesson_averaged_over_classes_has_the_worked_gradient() -> None:
    for per_class, wanted in ((True, [-0.25, 0.25]), (False, [-0.5, 0.5])):
        student = torch.zeros(1, 2, requires_grad=True)
        sure = torch.tensor([[[1000.0, 0.0]]])
        lesson = Lesson.of(sure, torch.ones(1, 1), mean="probabilities", direction="teacher-first", per_class=per_class)
        (slope,) = torch.autograd.grad(lesson.loss(student), student)
        assert slope.tolist() == [wanted]


def test_lesson_of_equal_weights_on_logits_is_feddfs_mean() -> None:
    equal = torch.full((M, B), 1 / M, dtype=torch.float64)
    lesson = Lesson.of(MEMBERS, equal, mean="logits", direction="teacher-first", per_class=False)
    torch.testing.assert_close(lesson.answers, torch.softmax(MEMBERS.mean(0), dim=1))


@pytest.mark.parametrize("direction", ["teacher-first", "student-first"])
def test_lesson_of_a_pool_is_the_divergence_from_its_answer_alone(direction: str) -> None:
    combiner = Weighted([1.0, *[3.0] * (len(MEMBERS) - 1)])
    ensemble = Ensemble([Constant(logits) for logits in MEMBERS], combiner)
    images = torch.zeros(MEMBERS.shape[1], 1)
    lesson = Lesson.of_ensemble(ensemble, images, WEIGHTS, mean="pool", direction=direction, per_class=False)
    answer = torch.softmax(combiner(MEMBERS.float()).double(), dim=1)  # an ensemble's logits are float32
    own = torch.softmax(STUDENT, dim=1)
    first, second = (answer, own) if direction == "teacher-first" else (own, answer)
    expected = (first * (first / second).log()).sum(1).mean()
    torch.testing.assert_close(lesson.loss(STUDENT).double(), expected, rtol=1e-5, atol=1e-6)
