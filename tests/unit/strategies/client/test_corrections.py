"""How far local training goes, and its sparse updates; FedProx, FedDyn and SCAFFOLD are by hand elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from strategies.client.corrections import (
    LocalUpdate,
    SparseUpdate,
    Travel,
    parameters_of,
)
from strategies.client.round_state import RoundState
from strategies.core.errors import UploadError
from strategies.uploads.ternary import VALUES, Compression

State = dict[str, torch.Tensor]


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def like(model: nn.Module, seed: int) -> State:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=rng) for name, value in model.named_parameters()}


def moved(model: nn.Module, step: State, scale: float = 1.0) -> nn.Module:
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(step[name], alpha=scale)
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_travel_is_how_far_sgd_carries_a_weight_whose_gradient_is_one(momentum: float) -> None:
    weight, travel = torch.zeros(1, requires_grad=True), Travel(momentum)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for lr in (0.1, 0.1, 0.05, 0.02):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.ones(1)
        optimizer.step()
        travel.step(lr)
    assert travel.length == pytest.approx(-weight.item(), rel=1e-6)
    assert momentum or travel.length == pytest.approx(0.27)


@pytest.mark.parametrize("values", VALUES)
def test_sparse_updates_and_their_rests_add_up_to_the_whole(values: str) -> None:
    left, sent, whole, stc = None, 0.0, 0.0, Compression(0.1, values)
    for round_ in range(4):
        model = net()
        update = SparseUpdate(model, stc, left)
        step = like(model, round_)
        moved(model, step)
        code, left = update.finish(model)
        arrays = {name: value.numpy() for name, value in code.items()}
        sent += stc.decode(arrays, len(left), "update").dense()
        whole += np.concatenate([step[name].numpy().ravel() for name in sorted(step)])
    np.testing.assert_allclose(sent + left.numpy(), whole, atol=1e-5)
    assert np.count_nonzero(sent) <= 4 * 3


def sent_by_server(model: nn.Module, **records: State) -> dict[str, State]:
    return {"arrays": {name: value.clone() for name, value in model.state_dict().items()}, **records}


@pytest.mark.parametrize("values", VALUES)
def test_sparse_update_of_the_server_is_added_to_the_weights_of_the_round_before(tmp_path: Path, values: str) -> None:
    memory, stc = RoundState(tmp_path / "run", "alice"), Compression(0.2, values)
    said = {"server-round": 1, "stc-density": 0.2, "stc-values": values}
    start, model = net(1), net()
    LocalUpdate(model, said, sent_by_server(start), memory=memory).finish(moved(model, like(model, 2)))
    names = sorted(parameters_of(start))
    size = sum(parameters_of(start)[name].numel() for name in names)
    step = stc.compress(np.random.default_rng(0).standard_normal(size).astype(np.float32))
    code = {name: torch.from_numpy(value) for name, value in stc.encode(step).items()}
    buffers = {name: value for name, value in start.state_dict().items() if name not in names}
    sent = {"arrays": buffers, "ternary": code}
    LocalUpdate(model, {**said, "server-round": 2}, sent, memory=memory)
    flat = torch.cat([parameters_of(model)[name].flatten() for name in names])
    wanted = torch.cat([parameters_of(start)[name].flatten() for name in names]) + torch.from_numpy(step.dense())
    assert torch.equal(flat, wanted)
    # Two rounds later the weights that it belongs to are not here.
    with pytest.raises(UploadError, match="the client lacks the weights of the round before"):
        LocalUpdate(model, {**said, "server-round": 4}, sent, memory=memory)
