"""FedProx's and FedDyn's terms: against their objectives by autograd, and what optimisers make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from strategies.client.corrections import ControlVariates, DynamicRegularizer, LocalUpdate, Proximal, Travel
from strategies.core.errors import UploadError

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


def test_gradient_at_rest_is_alpha_times_the_drift_the_other_way() -> None:
    """FedDyn's invariant, Acar et al., Section 2.1: the next drift is the client's own gradient, over -alpha."""
    model = nn.Linear(2, 1, bias=False).double()
    goal = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    drift = {"weight": torch.tensor([[0.5, 2.0]], dtype=torch.float64)}
    term = DynamicRegularizer(model, ALPHA, drift)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        ((model.weight - goal).square().sum() / 2 + term.penalty(model)).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.detach() - goal, -ALPHA * term.finish(model)["weight"])


def test_drift_of_another_shape_is_as_none() -> None:
    model = net()
    at_start = gradient(model, DynamicRegularizer(model, ALPHA, {"0.weight": torch.ones(1)}).penalty(model))
    assert torch.equal(at_start, torch.zeros_like(at_start))


def test_weight_decay_is_part_of_the_control_variate() -> None:
    model, decay = nn.Linear(2, 1, bias=False).double(), 0.1
    server, own = like(model, 1), like(model, 2)
    control, travel = ControlVariates(model, server, own), Travel()
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=decay), []
    for _ in range(4):
        optimizer.zero_grad()
        own_loss = model.weight.pow(4).sum()
        gradients.append(gradient(model, own_loss + decay / 2 * model.weight.square().sum()))
        (model.weight.pow(4).sum() + control.penalty(model)).backward()
        optimizer.step()
        travel.step(0.05)
    found, _ = control.finish(model, travel.length)
    torch.testing.assert_close(vector(found), torch.stack(gradients).mean(0))


def test_rates_that_change_within_a_round_are_counted_as_they_were() -> None:
    model, gradient_of = nn.Linear(2, 1, bias=False).double(), torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    zeros = {"weight": torch.zeros(1, 2, dtype=torch.float64)}
    control, travel = ControlVariates(model, zeros, {}), Travel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for rate in (0.1, 0.05, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        model.weight.grad = gradient_of.clone()
        optimizer.step()
        travel.step(rate)
    torch.testing.assert_close(control.finish(model, travel.length)[0]["weight"], gradient_of)


def test_scaffold_without_a_counted_step_is_refused() -> None:
    model = net()
    with pytest.raises(UploadError, match=r"the length of the local steps is 0.0: must be above 0"):
        ControlVariates(model, like(model, 1), {}).finish(model, 0.0)


def test_local_update_adds_feddyn_s_term_and_others_beside_it() -> None:
    model = net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    server = like(model, 5)
    update = LocalUpdate(model, {"feddyn-alpha": ALPHA, "proximal-mu": MU}, {"arrays": start, "control": server})
    elsewhere(model, 6)
    wanted = (ALPHA + MU) * vector(like(model, 6)) + vector(server)
    torch.testing.assert_close(gradient(model, update.penalty(model)), wanted)
    # Logits and labels are for corrections that look at them; there is none.
    logits = torch.zeros(4, 2, dtype=torch.float64)
    assert torch.equal(update.penalty(model, logits, torch.zeros(4).long()), update.penalty(model))
