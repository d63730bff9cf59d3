import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strategies.combiners.aggregators import (
    AGGREGATORS,
    TORCH_ONLY,
    Array,
    Params,
)

ROOT = Path(__file__).resolve().parents[4]
HERE = [name for name in AGGREGATORS if name not in TORCH_ONLY]
MEMBERS, EXAMPLES = 4, 30


def classes_of(name: str) -> int:
    return 2 if name.startswith("two-class-") else 3


def example(name: str, seed: int = 0) -> tuple[Params, Array, Array]:
    """Return parameters, logits and labels on which an aggregator can be tried."""
    rng, classes = np.random.default_rng(seed), classes_of(name)
    logits = (3 * rng.normal(size=(MEMBERS, EXAMPLES, classes))).astype(np.float32)
    labels = rng.integers(0, classes, EXAMPLES)
    params = AGGREGATORS[name].start(seed, members=MEMBERS, classes=classes, hidden=5)
    if AGGREGATORS[name].counts:
        params = {key: rng.integers(0, 9, value.shape).astype(np.float32) for key, value in params.items()}
    return params, logits, labels


def array(*values: object) -> Array:
    return np.array(values, dtype=np.float32)


# The names


# Initial parameters


# The forms, on numbers by hand: M = 2, B = 1

LOGITS = array([[1.0, 2.0, 3.0]], [[5.0, 6.0, 7.0]])
PAIR = array([[0.0, math.log(3)]], [[1.0, 1.0]])  # the members give class 1 a probability of 3/4 and of 1/2


@pytest.mark.parametrize(
    ("name", "params", "logits", "expected"),
    [
        ("average", {}, LOGITS, [3.0, 4.0, 5.0]),
        ("weighted", {"weights": array([3, 0, 0], [1, 4, 0])}, LOGITS, [2.0, 6.0, 0.0]),
        ("linear", {"weight": array(2, -1), "bias": array(1)}, LOGITS, [-2.0, -1.0, 0.0]),
        ("per-class", {"weight": array([1, 2, 0], [0, 1, -1])}, LOGITS, [1.0, 10.0, -7.0]),
        (
            "nn",  # hidden units 1 + 5 = 6, and 3 - 7 + 2 < 0
            {
                "weight1": array([1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, -1]),
                "bias1": array(0, 2),
                "weight2": array([1, 1], [0.5, 9], [-1, 0]),
                "bias2": array(0, 1, 0),
            },
            LOGITS,
            [6.0, 4.0, -6.0],
        ),
        ("two-class-average", {}, PAIR, [0.0, math.log(5 / 3)]),
        ("two-class-weighted", {"weights": array([1, 3], [3, 1])}, PAIR, [0.0, math.log((9 / 16 + 1 / 8) / (7 / 16))]),
        ("two-class-per-class", {"weight": array(2, 5), "bias": array(-1)}, PAIR, [0.0, 2 * math.log(3) - 1]),
        (
            "two-class-nn",  # sigmoid(log 3) = 3/4, sigmoid(0) = 1/2
            {"weight1": array([1, 0], [0, 1]), "bias1": array(0, 0), "weight2": array([4, 2]), "bias2": array(1)},
            PAIR,
            [0.0, 5.0],
        ),
    ],
)
def test_combine_of_two_members_equals_the_numbers_by_hand(
    name: str, params: Params, logits: Array, expected: list[float]
) -> None:
    np.testing.assert_allclose(AGGREGATORS[name].forward(params, logits), [expected], rtol=1e-6)


def permuted(name: str, params: Params, order: list[int]) -> Params:
    """Return the parameters of the same ensemble with its members in another order."""
    if name == "nn":
        hidden, width = params["weight1"].shape
        first = params["weight1"].reshape(hidden, MEMBERS, width // MEMBERS)[:, order].reshape(hidden, width)
        return {**params, "weight1": first}
    if name == "two-class-nn":
        return {**params, "weight1": params["weight1"][:, order]}
    return {key: value[order] if key in ("weight", "weights", "counts") else value for key, value in params.items()}


@pytest.mark.parametrize("name", HERE)
def test_combine_of_members_in_another_order_is_the_same(name: str) -> None:
    params, logits, _ = example(name)
    order = [2, 0, 3, 1]

    combined = AGGREGATORS[name].forward(permuted(name, params, order), logits[order])

    np.testing.assert_allclose(combined, AGGREGATORS[name].forward(params, logits), rtol=2e-5, atol=2e-5)


# Gradients: their values are tested against automatic differentiation, in tests/reference


# Foreign parameters


# Local steps


# All of it together


def test_a_step_and_a_vote_where_torch_is_blocked_work() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from strategies.combiners.aggregator_steps import Sgd, local_steps
from strategies.combiners.aggregators import AGGREGATORS
from strategies.combiners.forms import vote_counts
z, y = np.ones((2, 6, 3), np.float32), np.arange(6) % 3
for name in ("linear", "per-class", "nn"):
    params = AGGREGATORS[name].start(0, members=2, classes=3)
    trained = local_steps(name, params, logits=z, labels=y, sgd=Sgd(2, 4, 0.1), seed=0)
    assert trained.keys() == params.keys()
print(int(vote_counts(z, y).sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("12", "")
