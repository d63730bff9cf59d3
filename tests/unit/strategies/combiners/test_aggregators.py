import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strategies.combiners.aggregators import AGGREGATORS, Array, Params

ROOT = Path(__file__).resolve().parents[4]
TRAINED = [name for name, entry in AGGREGATORS.items() if entry.kind == "trained"]
MEMBERS, EXAMPLES = 4, 30


def classes_of(name: str) -> int:
    return 2 if name.startswith("two-class-") else 3


def example(name: str, seed: int = 0) -> tuple[Params, Array, Array]:
    """Return parameters, logits and labels on which an aggregator can be tried."""
    rng, classes = np.random.default_rng(seed), classes_of(name)
    logits = (3 * rng.normal(size=(MEMBERS, EXAMPLES, classes))).astype(np.float32)
    labels = rng.integers(0, classes, EXAMPLES)
    return AGGREGATORS[name].start(seed, members=MEMBERS, classes=classes, hidden=5), logits, labels


def permuted(name: str, params: Params, order: list[int]) -> Params:
    """Return the parameters of the same ensemble with its members in another order."""
    if name == "nn":
        hidden, width = params["weight1"].shape
        first = params["weight1"].reshape(hidden, MEMBERS, width // MEMBERS)[:, order].reshape(hidden, width)
        return {**params, "weight1": first}
    if name == "two-class-nn":
        return {**params, "weight1": params["weight1"][:, order]}
    return {key: value[order] if key == "weight" else value for key, value in params.items()}


@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_gradient_of_members_in_another_order_are_the_same(name: str) -> None:
    params, logits, labels = example(name)
    order = [2, 0, 3, 1]

    loss, gradient = AGGREGATORS[name].gradient(permuted(name, params, order), logits[order], labels)
    expected, moved = AGGREGATORS[name].gradient(params, logits, labels)

    assert loss == pytest.approx(expected, rel=2e-5)
    for key, value in permuted(name, moved, order).items():
        np.testing.assert_allclose(gradient[key], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", sorted(AGGREGATORS.keys() - TRAINED))
def test_an_aggregator_without_a_form_in_numpy_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not trained by gradients in numpy"):
        AGGREGATORS[name].start(0, members=2, classes=2)


def test_a_step_and_a_vote_where_torch_is_blocked_work() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from strategies.combiners.aggregator_steps import Sgd, local_steps
from strategies.combiners.aggregators import AGGREGATORS
from strategies.combiners.aggregators import vote_counts
z, y = np.ones((2, 6, 3), np.float32), np.arange(6) % 3
for name in ("linear", "per-class", "nn"):
    params = AGGREGATORS[name].start(0, members=2, classes=3)
    trained = local_steps(name, params, logits=z, labels=y, sgd=Sgd(2, 4, 0.1), seed=0)
    assert trained.keys() == params.keys()
print(int(vote_counts(z, y).sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("12", "")
