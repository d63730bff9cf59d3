import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from strategies.aggregation.fed_adam import FedAdam
from strategies.aggregation.training import Sgd, local_steps
from strategies.combiners.aggregators import (
    AGGREGATORS,
    STATIC,
    TORCH_ONLY,
    Array,
    Params,
    aggregator_for,
    check_params,
    cross_entropy,
)
from strategies.combiners.voting import merged, vote_counts
from strategies.core.errors import OptionError

ROOT = Path(__file__).resolve().parents[4]
TRAINED = [name for name, entry in AGGREGATORS.items() if entry.kind == "trained"]
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


def test_the_aggregators_are_the_seven_of_the_paper_and_their_forms_for_two_classes() -> None:
    general = [name for name in AGGREGATORS if not name.startswith("two-class-")]

    assert general == ["average", "weighted", "linear", "per-class", "nn", "voting", "moe"]
    assert set(AGGREGATORS) - set(general) == {f"two-class-{n}" for n in ("average", "weighted", "per-class", "nn")}
    assert {"average", "weighted", "two-class-average", "two-class-weighted"} == STATIC
    assert {"moe"} == TORCH_ONLY
    assert [name for name, entry in AGGREGATORS.items() if entry.kind == "voted"] == ["voting"]


@pytest.mark.parametrize(
    ("name", "classes", "form"),
    [
        ("average", 10, "average"),
        ("average", 2, "two-class-average"),
        ("weighted", 2, "two-class-weighted"),
        ("per-class", 2, "two-class-per-class"),
        ("nn", 2, "nn"),
        ("two-class-nn", 2, "two-class-nn"),
        ("linear", 2, "linear"),
        ("voting", 2, "voting"),
    ],
)
def test_aggregator_for_two_classes_is_the_form_for_them(name: str, classes: int, form: str) -> None:
    assert aggregator_for(name, classes).name == form


def test_aggregator_for_a_name_that_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(OptionError, match="unknown aggregator 'median': known are average, weighted"):
        aggregator_for("median", 10)
    with pytest.raises(OptionError, match="'two-class-nn' is for 2 classes, and there are 10: must be one of average,"):
        aggregator_for("two-class-nn", 10)


# Initial parameters


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("linear", {"weight": ((20,), math.sqrt(6 / 21))}),
        ("per-class", {"weight": ((20, 10), math.sqrt(6 / 30))}),
        (
            "nn",
            {
                "weight1": ((40, 200), 1 / math.sqrt(200)),
                "bias1": ((40,), 1 / math.sqrt(200)),
                "weight2": ((10, 40), 1 / math.sqrt(40)),
                "bias2": ((10,), 1 / math.sqrt(40)),
            },
        ),
        ("two-class-per-class", {"weight": ((20,), 1 / math.sqrt(20)), "bias": ((1,), 1 / math.sqrt(20))}),
        (
            "two-class-nn",
            {
                "weight1": ((80, 20), 1 / math.sqrt(20)),
                "bias1": ((80,), 1 / math.sqrt(20)),
                "weight2": ((1, 80), 1 / math.sqrt(80)),
                "bias2": ((1,), 1 / math.sqrt(80)),
            },
        ),
    ],
)
def test_start_draws_every_parameter_from_its_range(
    name: str, bounds: Mapping[str, tuple[tuple[int, ...], float]]
) -> None:
    draws = [AGGREGATORS[name].start(seed, members=20, classes=10, hidden=40) for seed in range(60)]

    for key, (shape, bound) in bounds.items():
        values = np.stack([draw[key] for draw in draws])
        assert values.shape[1:] == shape
        assert values.dtype == np.float32
        assert (0.98 if values.size > 1000 else 0.9) * bound < np.abs(values).max() <= bound * (1 + 1e-6)
        assert np.abs(values).mean() == pytest.approx(bound / 2, rel=0.2)  # uniform, not all at the rim
        assert abs(values.mean()) < 0.2 * bound
    assert set(draws[0]) - set(bounds) == ({"bias"} if name == "linear" else set())


def test_start_of_linear_has_a_bias_of_one_and_of_counts_zeros() -> None:
    assert AGGREGATORS["linear"].start(0, members=3, classes=4)["bias"].tolist() == [1.0]
    assert AGGREGATORS["average"].start(0, members=3, classes=4) == {}
    for name, shape in (("weighted", (3, 4)), ("voting", (3, 4, 4))):
        (zeros,) = AGGREGATORS[name].start(0, members=3, classes=4).values()
        assert np.array_equal(zeros, np.zeros(shape))


@pytest.mark.parametrize("name", TRAINED)
def test_start_with_the_same_seed_has_the_same_bits_and_with_another_others(name: str) -> None:
    first, again, other = (AGGREGATORS[name].start(seed, members=3, classes=2) for seed in (7, 7, 8))

    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert not np.array_equal(first["weight" if "weight" in first else "weight1"], other[next(iter(other))])


def test_from_counts_keeps_them_as_the_parameters() -> None:
    params = AGGREGATORS["weighted"].from_counts([(3, 0), (1, 4)])

    assert {key: (value.tolist(), value.dtype) for key, value in params.items()} == {
        "weights": ([[3.0, 0.0], [1.0, 4.0]], np.float32)
    }
    assert list(AGGREGATORS["voting"].from_counts(np.zeros((2, 3, 3)))) == ["counts"]
    assert AGGREGATORS["average"].from_counts([None, None]) == {}


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


@pytest.mark.parametrize("name", HERE)
def test_combine_has_a_row_per_example_is_finite_and_changes_nothing(name: str) -> None:
    params, logits, _ = example(name)
    before = {key: value.copy() for key, value in params.items()}, logits.copy()

    combined = AGGREGATORS[name].forward(params, logits)

    assert combined.shape == logits.shape[1:]
    assert combined.dtype == np.float32
    assert np.all(np.isfinite(combined))
    assert all(np.array_equal(params[key], before[0][key]) for key in params)
    assert np.array_equal(logits, before[1])


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


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("weighted", {"weights": np.full((MEMBERS, 3), 7.0, np.float32)}),
        ("linear", {"weight": np.full(MEMBERS, 1 / MEMBERS, np.float32), "bias": array(0)}),
        ("per-class", {"weight": np.full((MEMBERS, 3), 1 / MEMBERS, np.float32)}),
    ],
)
def test_combine_with_uniform_weights_is_the_average(name: str, params: Params) -> None:
    _, logits, _ = example(name)

    combined = AGGREGATORS[name].forward(params, logits)

    np.testing.assert_allclose(combined, AGGREGATORS["average"].forward({}, logits), rtol=1e-5, atol=1e-6)


def test_two_class_weighted_with_equal_counts_is_the_two_class_average() -> None:
    _, logits, _ = example("two-class-weighted")
    counts = {"weights": np.full((MEMBERS, 2), 5.0, np.float32)}

    combined = AGGREGATORS["two-class-weighted"].forward(counts, logits)

    np.testing.assert_allclose(combined, AGGREGATORS["two-class-average"].forward({}, logits), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("held", [[[3, 0], [1, 0]], [[0, 0], [0, 0]]])
def test_two_class_weighted_of_a_class_without_examples_is_finite(held: list[list[int]]) -> None:
    params, logits = AGGREGATORS["two-class-weighted"].from_counts(held), 60 * (PAIR - 0.5)

    combined = AGGREGATORS["two-class-weighted"].forward(params, logits)

    assert np.all(np.isfinite(combined))
    if held[0][0]:
        assert combined.argmax(1).tolist() == [0]  # though the members are all but sure of class 1


def test_two_class_average_of_members_that_are_sure_stays_finite_and_ordered() -> None:
    sure = array([[0.0, -300.0], [0.0, -400.0]])

    combined = AGGREGATORS["two-class-average"].forward({}, sure)

    np.testing.assert_allclose(combined[:, 1], [-300.0, -400.0])


def test_linear_s_bias_moves_no_decision_and_gets_no_gradient() -> None:
    params, logits, labels = example("linear")

    loss, gradients = AGGREGATORS["linear"].gradient(params, logits, labels)
    moved, _ = AGGREGATORS["linear"].gradient({**params, "bias": array(9)}, logits, labels)

    assert moved == pytest.approx(loss, rel=1e-5)
    assert abs(float(gradients["bias"][0])) < 1e-6


# Gradients: their values are tested against automatic differentiation, in tests/reference


@pytest.mark.parametrize("name", TRAINED)
def test_gradient_has_the_form_of_the_parameters(name: str) -> None:
    params, logits, labels = example(name)

    loss, gradients = AGGREGATORS[name].gradient(params, logits, labels)

    check_params(params, gradients)
    assert loss > 0


@pytest.mark.parametrize("name", sorted(set(AGGREGATORS) - set(TRAINED)))
def test_gradient_of_an_aggregator_without_training_is_refused(name: str) -> None:
    logits = np.zeros((2, 1, 2), np.float32)

    with pytest.raises(ValueError, match=f"'{name}' is not trained"):
        AGGREGATORS[name].gradient({}, logits, np.zeros(1, np.int64))


def test_the_mixture_of_experts_is_sent_to_torch() -> None:
    with pytest.raises(ValueError, match=r"combiners\.gate starts"):
        AGGREGATORS["moe"].start(0, members=2, classes=3)
    with pytest.raises(ValueError, match=r"combiners\.gate applies"):
        AGGREGATORS["moe"].forward({}, LOGITS)


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    loss, residual = cross_entropy(array([1e4, 0.0], [0.0, 1e4]), np.array([0, 0]))

    assert loss == pytest.approx(5e3)
    assert residual.tolist() == [[0.0, 0.0], [-0.5, 0.5]]


# Foreign parameters


def test_check_params_accepts_its_own_form() -> None:
    check_params({"weight": array(1, 2)}, {"weight": array(3, 4)})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"are \[\]: must be \['weight'\]"),
        ({"weight": array(1, 2), "bias": array(1)}, r"\['bias', 'weight'\]"),
        ({"weight": array(1, 2, 3)}, r"is float32 \[3\]: must be float32 \[2\]"),
        ({"weight": np.ones(2)}, r"is float64 \[2\]: must be float32 \[2\]"),
        ({"weight": array(1, math.nan)}, "NaN or Inf"),
        ({"weight": array(1, math.inf)}, "NaN or Inf"),
    ],
)
def test_check_params_of_another_form_names_the_difference(given: Params, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_params({"weight": array(1, 2)}, given)


# Local steps


@pytest.mark.parametrize("name", TRAINED)
def test_one_step_on_all_examples_is_one_step_against_the_gradient(name: str) -> None:
    params, logits, labels = example(name)
    _, gradients = AGGREGATORS[name].gradient(params, logits, labels)

    stepped = local_steps(name, params, logits=logits, labels=labels, sgd=Sgd(1, 999, 0.25), seed=0)

    for key in params:
        assert stepped[key].dtype == np.float32
        np.testing.assert_allclose(stepped[key], params[key] - 0.25 * gradients[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_steps_change_nothing_that_was_given_and_have_the_same_bits_again(name: str) -> None:
    params, logits, labels = example(name)
    before, state = {key: value.copy() for key, value in params.items()}, np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]

    first, again, other = (
        local_steps(name, params, logits=logits, labels=labels, sgd=Sgd(3, 4, 0.1), seed=seed) for seed in (1, 1, 2)
    )

    assert all(np.array_equal(params[key], before[key]) for key in params)
    assert all(np.array_equal(first[key], again[key]) for key in params)
    assert any(not np.array_equal(first[key], other[key]) for key in params)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index, union-attr]


@pytest.mark.parametrize("name", TRAINED)
def test_many_steps_lower_the_loss(name: str) -> None:
    params, logits, labels = example(name)

    trained = local_steps(name, params, logits=logits, labels=labels, sgd=Sgd(300, 10, 0.02), seed=0)

    aggregator = AGGREGATORS[name]
    assert aggregator.gradient(trained, logits, labels)[0] < aggregator.gradient(params, logits, labels)[0] - 0.01


def test_steps_without_examples_or_without_training_are_refused() -> None:
    params, logits, labels = example("linear")

    with pytest.raises(ValueError, match="no examples"):
        local_steps("linear", params, logits=logits[:, :0], labels=labels[:0], sgd=Sgd(1, 2, 0.1), seed=0)
    with pytest.raises(ValueError, match="'voting' is not trained"):
        local_steps("voting", {}, logits=logits, labels=labels, sgd=Sgd(1, 2, 0.1), seed=0)


def test_batches_are_an_epoch_without_replacement_and_then_another_order() -> None:
    batches = list(Sgd(steps=6, batch_size=4, lr=1.0).batches(10, seed=3))

    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = np.concatenate(batches[:3]), np.concatenate(batches[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() not in (second.tolist(), list(range(10)))


def test_a_batch_larger_than_the_examples_is_all_of_them_every_time() -> None:
    assert [sorted(batch) for batch in Sgd(3, 128, 1.0).batches(5, seed=0)] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(("count", "seen"), [(100, 40), (40, 40), (30, 30)])
def test_seen_is_the_number_of_examples_or_of_those_in_the_batches(count: int, seen: int) -> None:
    assert Sgd(steps=5, batch_size=8, lr=1.0).seen(count) == seen


# All of it together


def specialists(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Return logits of two members for four classes: each knows two, and calls the others one of its own, loudly."""
    labels = rng.integers(0, 4, count)
    logits = rng.normal(size=(2, count, 4)).astype(np.float32)
    for member, own in enumerate(([0, 1], [2, 3])):
        guess = np.where(np.isin(labels, own), labels, own[member])
        logits[member, np.arange(count), guess] += np.where(np.isin(labels, own), 4, 4 + 2 * member)
    return logits, labels


@pytest.mark.parametrize(("name", "gain"), [("per-class", 0.2), ("nn", 0.4)])
def test_federated_rounds_with_skewed_clients_beat_the_average(name: str, gain: float) -> None:
    rng = np.random.default_rng(0)
    logits, labels = specialists(rng, 400)
    # One client lacks class 3, the other class 0.
    parts = [(logits[:, kept], labels[kept]) for kept in (labels < 3, labels > 0)]
    aggregator, sgd, adam = AGGREGATORS[name], Sgd(1, 64, 1.0), FedAdam(0.02)
    params = aggregator.start(0, members=2, classes=4, hidden=8)
    state = adam.start(params)
    for number in range(200):
        updates = [
            (local_steps(name, params, logits=z, labels=y, sgd=sgd, seed=2 * number + n), sgd.seen(len(y)))
            for n, (z, y) in enumerate(parts)
        ]
        params, state = adam.step(params, state, updates)
    test_logits, test_labels = specialists(rng, 1000)

    def accuracy(combined: Array) -> float:
        return float((combined.argmax(1) == test_labels).mean())

    averaged = accuracy(AGGREGATORS["average"].forward({}, test_logits))
    assert accuracy(aggregator.forward(params, test_logits)) > averaged + gain


def test_votes_of_clients_with_different_classes_make_an_ensemble_that_beats_the_average() -> None:
    rng = np.random.default_rng(0)
    z, y = specialists(rng, 400)
    test_logits, test_labels = specialists(rng, 1000)
    counts = merged(vote_counts(z[:, part], y[part]) for part in (y < 2, y >= 2))

    def hits(name: str, params: Params) -> int:
        return int((AGGREGATORS[name].forward(params, test_logits).argmax(1) == test_labels).sum())

    assert hits("voting", AGGREGATORS["voting"].from_counts(counts)) > hits("average", {}) + 300


def test_a_step_and_a_vote_where_torch_is_blocked_work() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from strategies.aggregation.training import Sgd, local_steps
from strategies.combiners.aggregators import AGGREGATORS
from strategies.aggregation.fed_adam import FedAdam
from strategies.combiners.voting import vote_counts
z, y = np.ones((2, 6, 3), np.float32), np.arange(6) % 3
for name in ("linear", "per-class", "nn"):
    params = AGGREGATORS[name].start(0, members=2, classes=3)
    trained = local_steps(name, params, logits=z, labels=y, sgd=Sgd(2, 4, 0.1), seed=0)
    FedAdam(0.1).step(params, FedAdam(0.1).start(params), [(trained, 4)])
print(int(vote_counts(z, y).sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("12", "")
