import math
from collections.abc import Mapping

import numpy as np
import pytest
from flower_fakes import act_in_a_run
from flwr.app import Array as Sent
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam as FlowerFedAdam

from strategies.combiners.aggregator_trainers import FedAdam
from strategies.combiners.aggregators import Array, Params


def params(*values: float) -> Params:
    return {"weight": np.array(values, dtype=np.float32)}


def random_params(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}


def assert_same_bits(left: Mapping[str, Array], right: Mapping[str, Array]) -> None:
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left)


def test_first_step_equals_the_one_by_hand() -> None:
    # Clients moved by 1 and by -0.2 and saw 30 and 10 examples: Delta = 0.7; m = 0.07; v = 0.0049, its root 0.07.
    adam, start = FedAdam(lr=0.5), params(2.0)

    moved, state = adam.step(start, adam.start(start), [(params(3.0), 30), (params(1.8), 10)])

    assert float(moved["weight"][0]) == pytest.approx(2 + 0.5 * 0.07 / (0.07 + 1e-3), rel=1e-6)
    assert float(state["m.weight"][0]) == pytest.approx(0.07, rel=1e-6)
    assert float(state["v.weight"][0]) == pytest.approx(0.0049, rel=1e-6)


def test_second_step_equals_the_one_by_hand() -> None:
    adam, start = FedAdam(lr=0.1), params(0.0)

    first, state = adam.step(start, adam.start(start), [(params(1.0), 1)])
    second, state = adam.step(first, state, [({"weight": first["weight"] - np.float32(2)}, 1)])

    m, v = 0.9 * 0.1 + 0.1 * -2, 0.99 * 0.01 + 0.01 * 4
    assert float(first["weight"][0]) == pytest.approx(0.1 * 0.1 / (0.1 + 1e-3), rel=1e-6)
    assert float(second["weight"][0]) == pytest.approx(float(first["weight"][0]) + 0.1 * m / (math.sqrt(v) + 1e-3))
    assert float(state["m.weight"][0]) == pytest.approx(m, rel=1e-5)
    assert float(state["v.weight"][0]) == pytest.approx(v, rel=1e-5)


def test_clients_in_any_order_give_the_same_bits() -> None:
    adam, start = FedAdam(lr=0.01), random_params(0)
    updates = [(random_params(seed), float(weight)) for seed, weight in ((1, 128), (2, 40), (3, 77), (4, 128))]

    moved, state = adam.step(start, adam.start(start), updates)
    again, same = adam.step(start, adam.start(start), updates[::-1])

    assert_same_bits(moved, again)
    assert_same_bits(state, same)


@pytest.mark.parametrize(
    ("updates", "said"),
    [
        ([], "weights of 0 updates sum to 0"),
        ([(params(1.0, 1.0), 0)], "weights of 1 updates sum to 0"),
        ([(params(1.0, math.nan), 1)], "'weight' holds NaN"),
        ([(params(1.0), 1)], r"float32 \[1\]: must be float32 \[2\]"),
        ([(params(1.0, 1.0), 1), ({"bias": np.ones(2, np.float32)}, 1)], r"\['bias'\]: must be \['weight'\]"),
    ],
)
def test_updates_that_cannot_be_averaged_are_refused(updates: list[tuple[Params, float]], said: str) -> None:
    adam, start = FedAdam(lr=0.1), params(0.0, 0.0)

    with pytest.raises(ValueError, match=said):
        adam.step(start, adam.start(start), updates)


def flower_round(strategy: FlowerFedAdam, number: int, start: Params, updates: list[tuple[Params, float]]) -> Params:
    """Let Flower's own strategy aggregate one round."""
    strategy.current_arrays = {key: value.astype(np.float64) for key, value in start.items()}
    replies = []
    for update, weight in updates:
        question = Message(RecordDict({"config": ConfigRecord()}), dst_node_id=1, message_type="train")
        arrays = ArrayRecord({key: Sent(value.astype(np.float64)) for key, value in update.items()})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": weight})})
        replies.append(Message(content, reply_to=question))
    arrays, _ = strategy.aggregate_train(number, replies)
    return {key: value.numpy() for key, value in arrays.items()}


def test_flower_s_fed_adam_differs_by_the_correction_of_its_rate_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    act_in_a_run(monkeypatch)
    flower, start = FlowerFedAdam(eta=0.3), random_params(0)
    state = FedAdam(0.3).start(start)
    factors = []
    for number in range(1, 4):
        updates = [(random_params(10 * number + client), 5.0 + client) for client in range(3)]
        factors.append(math.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1)))
        plain, _ = FedAdam(0.3).step(start, state, updates)
        ours, state = FedAdam(0.3 * factors[-1]).step(start, state, updates)
        theirs = flower_round(flower, number, start, updates)
        for key in start:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-6)
            assert not np.allclose(plain[key], theirs[key], rtol=1e-3)
        start = ours
    assert factors[0] == pytest.approx(0.74, abs=0.005)
