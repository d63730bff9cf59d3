from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from client_app.training.losses import sharpen


def net(*, norm: bool = False) -> nn.Sequential:
    rng = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return model


X, Y = torch.randn(9, 5, generator=torch.Generator().manual_seed(4)), torch.arange(9) % 3


def gradients(model: nn.Module, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    names = [name for name, _ in model.named_parameters()]
    loss = F.cross_entropy(torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), X), Y)
    return list(torch.autograd.grad(loss, parameters))


def first_pass(model: nn.Module) -> None:
    F.cross_entropy(model(X), Y).backward()  # type: ignore[no-untyped-call]


def test_the_gradient_is_that_of_the_neighbour_uphill_and_the_weights_stay_to_the_bit() -> None:
    model, rho = net(), 0.3
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    slope = gradients(model, weights)
    length = torch.cat([g.flatten() for g in slope]).norm()
    uphill = [(w + rho * g / length).detach().requires_grad_() for w, g in zip(weights, slope, strict=True)]
    expected = gradients(model, uphill)

    first_pass(model)
    sharpen(model, lambda: F.cross_entropy(model(X), Y), rho=rho)

    for p, start, wanted in zip(model.parameters(), weights, expected, strict=True):
        assert torch.equal(p, start)
        torch.testing.assert_close(p.grad, wanted)
    assert not torch.allclose(slope[0], expected[0])
