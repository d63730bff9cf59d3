import math

import numpy as np
import pytest
import torch

from strategies.combiners.combiners import build_combiner
from strategies.combiners.expert_gate import ExpertGate, expert_divergence, expert_mixture

RNG = np.random.default_rng(0)
MEMBERS, BATCH, CLASSES = 3, 7, 4
LOGITS = RNG.normal(size=(MEMBERS, BATCH, CLASSES)).astype(np.float32) * 3
WEIGHT = RNG.normal(size=(MEMBERS, MEMBERS * CLASSES)).astype(np.float32)
BIAS = RNG.normal(size=MEMBERS).astype(np.float32)


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max(-1, keepdims=True))
    result: np.ndarray = exponentials / exponentials.sum(-1, keepdims=True)
    return result


def test_the_mixture_is_the_gate_s_mean_of_predictions_as_numpy_has_it() -> None:
    opinions = softmax(LOGITS)
    expected = np.zeros((BATCH, CLASSES))
    for i in range(BATCH):
        gate = softmax(WEIGHT @ np.concatenate([opinions[k, i] for k in range(MEMBERS)]) + BIAS)
        expected[i] = sum(gate[k] * opinions[k, i] for k in range(MEMBERS))

    combiner = ExpertGate(torch.from_numpy(WEIGHT), torch.from_numpy(BIAS))

    torch.testing.assert_close(
        combiner(torch.from_numpy(LOGITS)).exp().double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6
    )


def test_a_gate_of_zeros_is_the_plain_mean_of_predictions() -> None:
    logits = torch.from_numpy(LOGITS)
    zeros = {"weight": torch.zeros(MEMBERS, MEMBERS * CLASSES), "bias": torch.zeros(MEMBERS)}
    torch.testing.assert_close(expert_mixture(zeros, logits).exp(), logits.softmax(2).mean(0))


def test_a_bias_alone_chooses_one_expert() -> None:
    logits = torch.from_numpy(LOGITS)
    gate = build_combiner("expert-gate", {"weight": torch.zeros(3, 12), "bias": torch.tensor([0.0, 200.0, 0.0])})
    torch.testing.assert_close(gate(logits), logits[1].log_softmax(1))


def test_logits_of_any_size_give_finite_logits_and_gradients() -> None:
    logits = (torch.from_numpy(LOGITS) * 1e4).requires_grad_()
    combined = ExpertGate(torch.from_numpy(WEIGHT), torch.from_numpy(BIAS))(logits)
    combined.sum().backward()
    assert bool(combined.isfinite().all())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize(("weight", "bias"), [((3, 12), 2), ((3, 11), 3), ((2, 12), 3)])
def test_tensors_that_do_not_fit_are_refused(weight: tuple[int, int], bias: int) -> None:
    with pytest.raises(ValueError, match=r"must be \[M, M C\] and \[M\]"):
        ExpertGate(torch.zeros(weight), torch.zeros(bias))


def test_divergence_of_experts_is_jensen_shannon_s_as_numpy_has_it() -> None:
    opinions = softmax(LOGITS.astype(np.float64))
    middle = opinions.mean(0)
    expected = float((opinions * np.log(opinions / middle)).sum(-1).mean())
    assert float(expert_divergence(torch.from_numpy(LOGITS))) == pytest.approx(expected, rel=1e-5)


def test_divergence_is_zero_where_all_agree_and_log_m_where_none_do() -> None:
    same = torch.from_numpy(LOGITS[:1]).expand(MEMBERS, -1, -1)
    apart = 100 * torch.eye(3, CLASSES)[:, None]
    assert float(expert_divergence(same)) == pytest.approx(0, abs=1e-6)
    assert float(expert_divergence(apart)) == pytest.approx(math.log(3))
