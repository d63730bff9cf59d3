from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import softmax
from torch import nn

from strategies.combiners.combiners import Weighted
from strategies.core.seeds import generator as rng
from strategies.distillation.consensus import Lesson, discrepancy
from strategies.distillation.distill import Distillation
from strategies.distillation.losses import hard_cross_entropy
from strategies.teacher.ensemble import Ensemble

RNG = torch.Generator().manual_seed(0)
A = torch.randn(6, 4, generator=RNG)


LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def test_hard_cross_entropy_of_the_text_differentiates_its_factor_too() -> None:
    logits = A.clone().requires_grad_()
    hard_cross_entropy(logits, LABELS, differentiated=True).backward()  # type: ignore[no-untyped-call]
    p = A.softmax(1)
    q = p[torch.arange(6), LABELS][:, None]
    onehot = torch.nn.functional.one_hot(LABELS, 4)
    torch.testing.assert_close(logits.grad, (q * q.log() - (1 - q)) * (onehot - p) / 6)


# The losses on members that are weighed sample by sample, against their formulas in numpy.


M, CONSENSUS_B, C = 3, 5, 4
STUDENT = torch.randn(CONSENSUS_B, C, generator=rng(0), dtype=torch.float64)
MEMBERS = 2 * torch.randn(M, CONSENSUS_B, C, generator=rng(1), dtype=torch.float64)
CONSENSUS_LABELS = torch.randint(C, (CONSENSUS_B,), generator=rng(2))
RAW = torch.rand(M, CONSENSUS_B, generator=rng(3), dtype=torch.float64)
WEIGHTS = RAW / RAW.sum(0)


class Constant(nn.Module):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == len(self.logits)
        return self.logits


def kl(first: np.ndarray, second: np.ndarray) -> float:
    return float((first * np.log(first / second)).sum())


s, f, y, a = STUDENT.numpy(), MEMBERS.numpy(), CONSENSUS_LABELS.numpy(), WEIGHTS.numpy()


BETWEEN: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "logits": lambda mine, theirs: np.abs(mine - theirs).mean(),
    "kl": lambda mine, theirs: kl(softmax(mine), softmax(theirs)),  # the student first
    "mse": lambda mine, theirs: ((mine - theirs) ** 2).mean(),
}


@pytest.mark.parametrize("form", BETWEEN)
def test_discrepancy_is_the_weighted_mean_over_samples(form: str) -> None:
    between = BETWEEN[form]
    wanted = np.mean([sum(a[k, i] * between(s[i], f[k, i]) for k in range(M)) for i in range(CONSENSUS_B)])
    assert float(discrepancy(STUDENT, MEMBERS, WEIGHTS, form)) == pytest.approx(wanted, rel=1e-12)
    if form == "mse":
        lesson = Lesson.of(MEMBERS, WEIGHTS, mean="probabilities", direction="mse", per_class=True)
        assert float(lesson.loss(STUDENT)) == pytest.approx(wanted, rel=1e-12)


def losses() -> np.ndarray:
    return np.array([[-np.log(softmax(f[k, i])[y[i]]) for i in range(CONSENSUS_B)] for k in range(M)])


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

    wanted = np.mean([one(i) for i in range(CONSENSUS_B)]) / (C if per_class else 1)
    lesson = Lesson.of(MEMBERS, WEIGHTS, mean=mean, direction=direction, per_class=per_class)
    assert float(lesson.loss(STUDENT)) == pytest.approx(wanted, rel=1e-12)


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


BATCHES = [
    (torch.randn(8, 5, generator=rng("images", i)), torch.randn(8, 3, generator=rng("logits", i)))  # type: ignore[arg-type]
    for i in range(3)
]


def distill(model: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, tick: Any = int, **options: Any) -> float:
    return Distillation(model, optimizer, **options).learn(batches, tick)


def student() -> nn.Linear:
    model = nn.Linear(5, 3)
    nn.init.normal_(model.weight, generator=rng(0))
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_distill_keeps_frozen_running_statistics_and_computes_with_them(frozen: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.running_mean.fill_(2.0)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    modes: list[tuple[bool, bool]] = []
    inputs: list[torch.Tensor] = []
    norm.register_forward_hook(lambda module, _, out: modes.append((module.training, model[1].training)))
    norm.register_forward_hook(lambda module, given, out: inputs.append(out.detach()))
    distill(model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), frozen_statistics=frozen)
    after = norm.state_dict()
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert [torch.equal(after[name], before[name]) for name in names] == [frozen] * 3
    assert modes == [(not frozen, True)] * 3  # the rest of the model trains
    assert not torch.equal(after["weight"], before["weight"])  # and so do the layer's own weights
    # Of images of mean 0, the running mean of 2 leaves about -2; a batch's own mean leaves 0.
    assert float(inputs[0].mean()) == pytest.approx(-2.0 if frozen else 0.0, abs=0.5)
