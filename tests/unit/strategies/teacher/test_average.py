import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strategies.core.seeds import generator as rng
from strategies.teacher import merged as module
from strategies.teacher.average import LARGEST, find_shrink_factors, shrink_tensors, tensor_norms, weighted_mean
from strategies.teacher.heads import last_linear, penultimate_features
from strategies.teacher.merged import AVERAGED, merge_layers

STATES = [{"w": torch.randn(3, 4, generator=rng(i)) * 10**i, "batches": torch.tensor(100 + 3 * i)} for i in range(4)]


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
    factors = find_shrink_factors(sizes)
    assert factors == [{}, {}, {}, {"w": pytest.approx(1 / (1.01 * LARGEST))}, {}]
    state = {"w": torch.tensor([0.6, -0.8]) * 1.01 * limit, "b": torch.tensor(1.0), "n": torch.tensor(3)}
    assert tensor_norms(state) == {"w": pytest.approx(1.01 * limit), "b": 1.0}
    small = shrink_tensors(state, factors[3])
    torch.testing.assert_close(small["w"], torch.tensor([1.2, -1.6]))
    assert (small["b"], small["n"]) == (state["b"], state["n"])
    assert shrink_tensors({"b": state["b"]}, factors[3]) == {"b": state["b"]}


# Linear layers merged by what the clients' updates have read, against numpy and cases that are known.


Layer = dict[str, Tensor]
INPUTS, OUTPUTS = 6, 3


def layer(seed: int, *, bias: bool = True) -> Layer:
    rng = torch.Generator().manual_seed(seed)
    found = {"l.weight": torch.randn(OUTPUTS, INPUTS, generator=rng)}
    return {**found, "l.bias": torch.randn(OUTPUTS, generator=rng)} if bias else found


def numpy_merge(start: Layer, clients: list[Layer], weights: list[float]) -> np.ndarray:
    """The solution of the normal equations, entry by entry of the loss."""

    def joined(state: Layer) -> np.ndarray:
        return np.concatenate([state["l.weight"].double().numpy(), state["l.bias"].double().numpy()[:, None]], axis=1)

    total, wanted = np.zeros((INPUTS + 1, INPUTS + 1)), np.zeros((OUTPUTS, INPUTS + 1))
    for state, weight in zip(clients, weights, strict=True):
        update = joined(state) - joined(start)
        values, vectors = np.linalg.eigh(update.T @ update)
        root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
        trusted = root / np.trace(root) + AVERAGED / (INPUTS + 1) * np.eye(INPUTS + 1)
        total += weight * trusted
        wanted += weight * update @ trusted
    return np.asarray(joined(start) + wanted @ np.linalg.inv(total))


def test_merged_layers_are_those_of_numpy() -> None:
    start, clients, weights = layer(0), [layer(seed) for seed in (1, 2, 3)], [1.0, 5.0, 2.0]

    found = merge_layers(start, zip(clients, weights, strict=True), ["l"])

    wanted = numpy_merge(start, clients, weights)
    np.testing.assert_allclose(found["l.weight"].numpy(), wanted[:, :-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["l.bias"].numpy(), wanted[:, -1], rtol=1e-5, atol=1e-6)


def test_clients_of_different_inputs_both_keep_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average would halve both updates; each input belongs to the client whose update spans it."""
    monkeypatch.setattr(module, "AVERAGED", 1e-9)
    start = {"l.weight": torch.zeros(OUTPUTS, INPUTS)}
    first, second = (start["l.weight"].clone() for _ in range(2))
    first[:, :2], second[:, 2:4] = layer(1)["l.weight"][:, :2], layer(2)["l.weight"][:, 2:4]

    found = merge_layers(start, [({"l.weight": first}, 1.0), ({"l.weight": second}, 1.0)], ["l"])["l.weight"]

    torch.testing.assert_close(found, first + second, rtol=1e-4, atol=1e-5)


# Last layers.


def test_last_linear_layer_is_found_by_name_and_is_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 5), nn.ReLU()))
    name, layer = last_linear(model)
    assert name == "2.0"
    assert layer is model.get_submodule(name)


def member(seed: int, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 3))


X = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def test_features_are_the_mean_input_of_the_last_linear_layers() -> None:
    members = [member(0), member(1)]
    with penultimate_features(members) as features:
        for model in members:
            model(X)
        seen = features()
    torch.testing.assert_close(seen, (members[0][:3](X) + members[1][:3](X)) / 2)


def test_norms_of_huge_weights_are_finite() -> None:
    assert tensor_norms({"w": torch.full((4,), 1e38)})["w"] == pytest.approx(2e38)
