"""The aggregators once more: numpy against torch's automatic differentiation, and torch against plain formulas."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strategies.combiners.aggregator_steps import Sgd, local_steps
from strategies.combiners.aggregators import AGGREGATORS, Array, Params
from strategies.combiners.combiners import build_combiner

TRAINED = [name for name, entry in AGGREGATORS.items() if entry.kind == "trained"]
MEMBERS, EXAMPLES = 5, 40


def example(name: str, seed: int) -> tuple[Params, Array, Array]:
    rng, classes = np.random.default_rng(seed), 2 if name.startswith("two-class-") else 4
    logits = (3 * rng.normal(size=(MEMBERS, EXAMPLES, classes))).astype(np.float32)
    if classes == 2 and seed % 2:
        logits[..., 0] = 0  # models of one logit
    if name in TRAINED:
        params = AGGREGATORS[name].start(seed, members=MEMBERS, classes=classes, hidden=6)
    else:
        params = AGGREGATORS[name].from_counts(rng.integers(0, 6, (MEMBERS, classes)))
    return params, logits, rng.integers(0, classes, EXAMPLES)


def tensors(params: Params) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in params.items()}


def combined(name: str, params: Params, logits: Array) -> Array:
    """Return what the server's form of an aggregator makes of the members' logits."""
    found: Array = build_combiner(AGGREGATORS[name].combiner, tensors(params))(torch.from_numpy(logits)).numpy()
    return found


def in_torch(name: str, params: Params) -> tuple[dict[str, torch.Tensor], Callable[[Array, Array], torch.Tensor]]:
    """Return an aggregator's weights as leaves, and the function from logits and labels to its loss."""
    combiner = build_combiner(name, tensors(params))
    leaves = {key: value.clone().requires_grad_() for key, value in combiner.state_dict().items()}

    def loss_of(logits: Array, labels: Array) -> torch.Tensor:
        combined = torch.func.functional_call(combiner, leaves, (torch.from_numpy(logits),))
        return torch.nn.functional.cross_entropy(combined, torch.from_numpy(labels))

    return leaves, loss_of


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_equal_automatic_differentiation(name: str, seed: int) -> None:
    params, logits, labels = example(name, seed)
    leaves, loss_of = in_torch(name, params)
    expected_loss = loss_of(logits, labels)
    expected = dict(zip(leaves, torch.autograd.grad(expected_loss, list(leaves.values())), strict=True))

    loss, gradients = AGGREGATORS[name].gradient(params, logits, labels)

    assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
    assert gradients.keys() == expected.keys()
    for key, value in gradients.items():
        np.testing.assert_allclose(value, expected[key].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", TRAINED)
def test_local_steps_equal_those_of_torch_s_sgd(name: str) -> None:
    params, logits, labels = example(name, 0)
    sgd = Sgd(steps=7, batch_size=16, lr=0.05)
    leaves, loss_of = in_torch(name, params)
    optimizer = torch.optim.SGD(leaves.values(), lr=0.05)
    for batch in sgd.batches(EXAMPLES, 11):
        optimizer.zero_grad()
        loss_of(logits[:, batch], labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    trained = local_steps(name, params, logits=logits, labels=labels, sgd=sgd, seed=11)

    for key, value in trained.items():
        np.testing.assert_allclose(value, leaves[key].detach().numpy(), rtol=1e-3, atol=1e-5)


# Plain formulas, one example and one class at a time, in double precision


def probabilities(logits: Array) -> NDArray[np.float64]:
    exponentials = np.exp(logits.astype(np.float64))
    result: NDArray[np.float64] = exponentials / exponentials.sum(-1, keepdims=True)
    return result


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["weighted", "two-class-average", "two-class-weighted"])
def test_static_aggregators_equal_their_sums(name: str, seed: int) -> None:
    params, logits, _ = example(name, seed)
    counts = params.get("weights", np.ones((MEMBERS, 2)))
    expected = np.zeros(logits.shape[1:])
    for b, c in np.ndindex(*expected.shape):
        values = logits[:, b, c] if name == "weighted" else probabilities(logits[:, b])[:, c]
        expected[b, c] = sum(counts[i, c] / counts[:, c].sum() * values[i] for i in range(MEMBERS))
    if name != "weighted":
        expected = np.stack([np.zeros(EXAMPLES), np.log(expected[:, 1] / expected[:, 0])], axis=1)

    np.testing.assert_allclose(combined(name, params, logits), expected, rtol=1e-4, atol=1e-5)


def test_trained_aggregators_equal_their_sums() -> None:
    for name in TRAINED:
        params, logits, _ = example(name, 0)
        for b in range(EXAMPLES):
            expected = by_hand(name, params, logits[:, b].astype(np.float64))
            found = combined(name, params, logits)[b]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def by_hand(name: str, params: Params, z: NDArray[np.float64]) -> list[float]:
    """Return the combined logits of one example, z [M, C]."""
    members, classes = z.shape
    if name == "linear":
        return [sum(params["weight"][i] * z[i, c] for i in range(members)) + params["bias"][0] for c in range(classes)]
    if name == "per-class":
        return [sum(params["weight"][i, c] * z[i, c] for i in range(members)) for c in range(classes)]
    d = z[:, 1] - z[:, 0]
    if name == "two-class-per-class":
        return [0.0, sum(params["weight"][i] * d[i] for i in range(members)) + params["bias"][0]]
    inputs = [z[i, c] for i in range(members) for c in range(classes)] if name == "nn" else list(d)
    hidden = []
    for row, bias in zip(params["weight1"], params["bias1"], strict=True):
        value = sum(w * x for w, x in zip(row, inputs, strict=True)) + bias
        hidden.append(max(value, 0.0) if name == "nn" else 1 / (1 + math.exp(-value)))
    outputs = [
        sum(w * h for w, h in zip(row, hidden, strict=True)) + bias
        for row, bias in zip(params["weight2"], params["bias2"], strict=True)
    ]
    return outputs if name == "nn" else [0.0, *outputs]
