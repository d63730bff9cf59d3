import numpy as np
import pytest
import torch

from strategies.combiners.expert_gate import ExpertGate, expert_divergence

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


def test_logits_of_any_size_give_finite_logits_and_gradients() -> None:
    logits = (torch.from_numpy(LOGITS) * 1e4).requires_grad_()
    combined = ExpertGate(torch.from_numpy(WEIGHT), torch.from_numpy(BIAS))(logits)
    combined.sum().backward()
    assert bool(combined.isfinite().all())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_divergence_of_experts_is_jensen_shannon_s_as_numpy_has_it() -> None:
    opinions = softmax(LOGITS.astype(np.float64))
    middle = opinions.mean(0)
    expected = float((opinions * np.log(opinions / middle)).sum(-1).mean())
    assert float(expert_divergence(torch.from_numpy(LOGITS))) == pytest.approx(expected, rel=1e-5)
