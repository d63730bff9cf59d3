"""Linear layers merged by what the clients' updates have read, against numpy and cases that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.teacher import merged as module
from strategies.teacher.merged import AVERAGED, merged_layers

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

    found = merged_layers(start, zip(clients, weights, strict=True), ["l"])

    wanted = numpy_merge(start, clients, weights)
    np.testing.assert_allclose(found["l.weight"].numpy(), wanted[:, :-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["l.bias"].numpy(), wanted[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_one_client_or_equal_clients_keep_their_weights(bias: bool) -> None:
    start, own = layer(0, bias=bias), layer(1, bias=bias)
    for count in (1, 3):
        found = merged_layers(start, [(own, 1.0)] * count, ["l"])
        assert found.keys() == own.keys()
        for key, value in own.items():
            torch.testing.assert_close(found[key], value)


def test_clients_of_different_inputs_both_keep_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average would halve both updates; each input belongs to the client whose update spans it."""
    monkeypatch.setattr(module, "AVERAGED", 1e-9)
    start = {"l.weight": torch.zeros(OUTPUTS, INPUTS)}
    first, second = (start["l.weight"].clone() for _ in range(2))
    first[:, :2], second[:, 2:4] = layer(1)["l.weight"][:, :2], layer(2)["l.weight"][:, 2:4]

    found = merged_layers(start, [({"l.weight": first}, 1.0), ({"l.weight": second}, 1.0)], ["l"])["l.weight"]

    torch.testing.assert_close(found, first + second, rtol=1e-4, atol=1e-5)


def test_order_of_clients_changes_nothing_and_a_still_client_only_averages() -> None:
    start, clients = layer(0), [layer(1), layer(2), layer(0)]

    one, other = (
        merged_layers(start, [(state, 1.0) for state in given], ["l"])["l.weight"] for given in (clients, clients[::-1])
    )

    torch.testing.assert_close(one, other)
    assert one.isfinite().all()
