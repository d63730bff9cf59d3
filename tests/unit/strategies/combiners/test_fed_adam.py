import math

import numpy as np
import pytest
from flower_fakes import act_in_a_run
from flwr.app import Array as Sent
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam as FlowerFedAdam

from strategies.combiners.aggregator_trainers import FedAdam
from strategies.combiners.aggregators import Params


def params(*values: float) -> Params:
    return {"weight": np.array(values, dtype=np.float32)}


def random_params(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}


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
