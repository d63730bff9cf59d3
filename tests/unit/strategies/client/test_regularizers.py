"""FedProx's and FedDyn's terms: against their objectives by autograd, and what optimisers make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from strategies.client.corrections import DynamicRegularizer, Proximal

State = dict[str, torch.Tensor]


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def like(model: nn.Module, seed: int) -> State:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(v.shape, generator=rng, dtype=v.dtype) for name, v in model.named_parameters()}


def vector(state: State) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in state.values()])


def gradient(model: nn.Module, term: torch.Tensor) -> torch.Tensor:
    return torch.cat([found.flatten() for found in torch.autograd.grad(term, list(model.parameters()))])


def elsewhere(model: nn.Module, seed: int) -> nn.Module:
    with torch.no_grad():
        for name, step in like(model, seed).items():
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
    model = net()
    start, drift = vector(dict(model.named_parameters())), like(model, 1)
    term = DynamicRegularizer(model, ALPHA, drift) if objective is feddyn else Proximal(model, MU)
    elsewhere(model, 2)
    w = vector(dict(model.named_parameters())).requires_grad_()
    (wanted,) = torch.autograd.grad(objective(w, start, vector(drift)), w)
    torch.testing.assert_close(gradient(model, term.penalty(model)), wanted)


def test_terms_differ_from_the_objective_by_a_constant_at_most() -> None:
    model = net()
    start, drift = vector(dict(model.named_parameters())), like(model, 1)
    term = DynamicRegularizer(model, ALPHA, drift)
    apart = []
    for seed in (2, 3):
        elsewhere(model, seed)
        w = vector(dict(model.named_parameters()))
        apart.append(term.penalty(model).item() - float(feddyn(w, start, vector(drift))))
    assert apart[0] == pytest.approx(apart[1])
    assert apart[0] == pytest.approx(ALPHA / 2 * float(start @ start))


def test_drift_grows_by_the_way_of_the_round_and_touches_no_buffer() -> None:
    model = net()
    drift = like(model, 1)
    term = DynamicRegularizer(model, ALPHA, drift)
    found = term.finish(elsewhere(model, 2))
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, step in like(model, 2).items():
        torch.testing.assert_close(found[name], drift[name] + step)
    assert all(not value.requires_grad for value in found.values())
