import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch

from strategies.core.seeds import generator as rng
from strategies.teacher.average import LARGEST, norms_of, shrinkage, shrunk, weighted_mean

STATES = [{"w": torch.randn(3, 4, generator=rng(i)) * 10**i, "batches": torch.tensor(100 + 3 * i)} for i in range(4)]


def test_mean_of_two_states_by_hand() -> None:
    states = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([5.0, -2.0]), "n": torch.tensor(4)},
    ]
    mean = weighted_mean(states, [1, 3])
    assert mean["w"].tolist() == [4.0, -1.0]
    assert mean["n"].dtype == torch.int64
    assert mean["n"].item() == 3  # 3.75, cut


def test_equal_weights_are_the_mean_and_equal_counts_stay() -> None:
    states = [{"w": state["w"], "batches": torch.tensor(100)} for state in STATES[:3]]
    mean = weighted_mean(states, [0.1] * 3)
    torch.testing.assert_close(mean["w"], torch.stack([state["w"] for state in states]).mean(0))
    assert weighted_mean(states, [1.0] * 3)["batches"].item() == 100


def test_the_order_of_clients_does_not_show() -> None:
    weights = [3.0, 17.0, 5.0, 11.0]
    results = []
    for order in itertools.permutations(range(4)):
        results.append(weighted_mean([STATES[i] for i in order], [weights[i] for i in order]))
    for result in results[1:]:
        torch.testing.assert_close(result["w"], results[0]["w"], rtol=0, atol=1e-6)
        assert torch.equal(result["batches"], results[0]["batches"])


def test_states_are_read_one_at_a_time_and_left_alone() -> None:
    read: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[dict[str, torch.Tensor]]:
        for state in STATES:
            assert sum(one() is not None for one in read) <= 1  # the one before is let go when the next is there
            made = {name: value.clone() for name, value in state.items()}
            read.append(weakref.ref(made["w"]))
            yield made

    before = [state["w"].clone() for state in STATES]
    weighted_mean(stream(), [1.0] * 4)
    assert len(read) == 4
    assert all(torch.equal(state["w"], copy) for state, copy in zip(STATES, before, strict=True))


def test_tensors_far_above_the_median_get_the_median_and_others_stay_as_they_are() -> None:
    limit = 2.0 * LARGEST
    sizes = [{"w": size, "b": 1.0} for size in (1.0, 2.0, limit, 1.01 * limit, 0.0)]
    factors = shrinkage(sizes)
    assert factors == [{}, {}, {}, {"w": pytest.approx(1 / (1.01 * LARGEST))}, {}]
    state = {"w": torch.tensor([0.6, -0.8]) * 1.01 * limit, "b": torch.tensor(1.0), "n": torch.tensor(3)}
    assert norms_of(state) == {"w": pytest.approx(1.01 * limit), "b": 1.0}
    small = shrunk(state, factors[3])
    torch.testing.assert_close(small["w"], torch.tensor([1.2, -1.6]))
    assert (small["b"], small["n"]) == (state["b"], state["n"])
    assert shrunk({"b": state["b"]}, factors[3]) == {"b": state["b"]}
