from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.seeds import generator as rng
from strategies.distillation.distill import Distillation
from strategies.distillation.losses import soft_kl

BATCHES = [
    (torch.randn(8, 5, generator=rng("images", i)), torch.randn(8, 3, generator=rng("logits", i)))  # type: ignore[arg-type]
    for i in range(3)
]


def distill(model: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, tick: Any = int, **options: Any) -> float:
    return Distillation(model, optimizer, **options).learn(batches, tick)


def student() -> nn.Linear:
    model = nn.Linear(5, 3)
    nn.init.normal_(model.weight, generator=rng(0))
    nn.init.zeros_(model.bias)
    return model


def test_distill_equals_sgd_written_out() -> None:
    model, plain = student(), student()
    losses = []
    for images, logits in BATCHES:
        loss = soft_kl(plain(images), logits, 4.0)
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        losses.append(float(loss.detach()))
    loss_at_4 = partial(soft_kl, temperature=4.0)
    mean = distill(model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), loss=loss_at_4)
    torch.testing.assert_close(model.weight, plain.weight)
    assert mean == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_distill_towards_a_teacher_of_the_same_form_finds_it() -> None:
    model, teacher = student(), nn.Linear(5, 3, bias=False)
    nn.init.normal_(teacher.weight, generator=rng(5))
    with torch.no_grad():
        batches = [(images, teacher(images)) for images, _ in BATCHES]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    first = distill(model, batches, optimizer)
    for _ in range(200):
        last = distill(model, batches, optimizer)
    assert last < 0.01 * first


@pytest.mark.parametrize("frozen", [False, True])
def test_distill_keeps_frozen_running_statistics_and_computes_with_them(frozen: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    norm.running_mean.fill_(2.0)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    modes: list[tuple[bool, bool]] = []
    inputs: list[torch.Tensor] = []
    norm.register_forward_hook(lambda module, _, out: modes.append((module.training, model[1].training)))
    norm.register_forward_hook(lambda module, given, out: inputs.append(out.detach()))
    distill(model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), frozen_statistics=frozen)
    after = norm.state_dict()
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert [torch.equal(after[name], before[name]) for name in names] == [frozen] * 3
    assert modes == [(not frozen, True)] * 3  # the rest of the model trains
    assert not torch.equal(after["weight"], before["weight"])  # and so do the layer's own weights
    # Of images of mean 0, the running mean of 2 leaves about -2; a batch's own mean leaves 0.
    assert float(inputs[0].mean()) == pytest.approx(-2.0 if frozen else 0.0, abs=0.5)
