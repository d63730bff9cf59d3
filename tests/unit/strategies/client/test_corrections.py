"""What strategies ask of local training: against autograd and numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_fakes import equal
from torch import nn

from strategies.client.corrections import (
    ControlVariates,
    DynamicRegularizer,
    LocalUpdate,
    Proximal,
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


def loss_of(model: nn.Module) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, 15).view(5, 3)
    return nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 0, 1, 1]))


def gradients(model: nn.Module, *terms: torch.Tensor) -> State:
    model.zero_grad()
    torch.stack(terms).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


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


def test_control_variates_add_the_server_s_and_take_off_the_client_s() -> None:
    model = net()
    server, own = like(model, 1), like(model, 2)
    control = ControlVariates(model, server, own)
    plain, found = gradients(model, loss_of(model)), gradients(model, loss_of(model), control.penalty(model))
    for name in server:
        torch.testing.assert_close(found[name], plain[name] + server[name] - own[name], rtol=1e-4, atol=1e-5)


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


# One client's part of a round.


def sent_by_server(model: nn.Module, **records: State) -> dict[str, State]:
    return {"arrays": {name: value.clone() for name, value in model.state_dict().items()}, **records}


def scaffold_round(memory: RoundState, number: int, seed: int) -> State:
    """Take part in a round that moves the weights by what follows from the seed; returns c - c_i of its steps."""
    model = net()
    update = LocalUpdate(model, {"server-round": number}, sent_by_server(net(), control=like(model, 9)), memory=memory)
    found = gradients(model, update.penalty(model))
    update.step(0.1)
    update.finish(moved(model, like(model, seed)))
    return found


def test_control_variate_is_remembered_and_a_round_that_is_asked_again_is_answered_alike(tmp_path: Path) -> None:
    memory = RoundState(tmp_path / "run", "alice")
    first, second = scaffold_round(memory, 1, 1), scaffold_round(memory, 2, 2)
    assert equal(first, like(net(), 9))  # c_i is 0
    assert equal(scaffold_round(memory, 2, 2), second)
    assert not equal(scaffold_round(RoundState(tmp_path / "other", "alice"), 2, 2), second)
    scaffold_round(memory, 3, 3)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.safetensors")) == [
        "alice-state-2.safetensors",
        "alice-state-3.safetensors",
    ]
    again = RoundState(tmp_path / "run2", "alice")
    assert equal(scaffold_round(again, 1, 1), first)


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


# FedProx's and FedDyn's terms: against their objectives by autograd, and what optimisers make of them.


def net_regularizers() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def like_regularizers(model: nn.Module, seed: int) -> State:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(v.shape, generator=rng, dtype=v.dtype) for name, v in model.named_parameters()}


def vector(state: State) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in state.values()])


def gradient(model: nn.Module, term: torch.Tensor) -> torch.Tensor:
    return torch.cat([found.flatten() for found in torch.autograd.grad(term, list(model.parameters()))])


def elsewhere(model: nn.Module, seed: int) -> nn.Module:
    with torch.no_grad():
        for name, step in like_regularizers(model, seed).items():
            model.get_parameter(name).add_(step)
    return model


ALPHA, MU = 0.3, 0.7
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def feddyn(w: torch.Tensor, start: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
    return ALPHA * (w @ (drift - start)) + ALPHA / 2 * (w @ w)


def fedprox(w: torch.Tensor, start: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
    return MU / 2 * (w - start) @ (w - start)


@pytest.mark.parametrize("objective", [feddyn, fedprox])
def test_gradient_is_that_of_the_objective(objective: Objective) -> None:
    model = net_regularizers()
    start, drift = vector(dict(model.named_parameters())), like_regularizers(model, 1)
    term = DynamicRegularizer(model, ALPHA, drift) if objective is feddyn else Proximal(model, MU)
    elsewhere(model, 2)
    w = vector(dict(model.named_parameters())).requires_grad_()
    (wanted,) = torch.autograd.grad(objective(w, start, vector(drift)), w)
    torch.testing.assert_close(gradient(model, term.penalty(model)), wanted)


def test_drift_grows_by_the_way_of_the_round_and_touches_no_buffer() -> None:
    model = net_regularizers()
    drift = like_regularizers(model, 1)
    term = DynamicRegularizer(model, ALPHA, drift)
    found = term.finish(elsewhere(model, 2))
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, step in like_regularizers(model, 2).items():
        torch.testing.assert_close(found[name], drift[name] + step)
    assert all(not value.requires_grad for value in found.values())


def test_disk_that_refuses_costs_the_memory_only(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "run").write_text("a file where the folder would be")
    assert scaffold_round(RoundState(tmp_path / "run", "alice"), 1, 1)
    assert any("alice: its state of round 1 is not saved" in line for line in said)
