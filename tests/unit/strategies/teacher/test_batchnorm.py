import pytest
import torch
from torch import nn

from strategies.teacher.batchnorm import batchnorm_loss, statistics_distance


def member(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4), nn.BatchNorm1d(4)
    )
    for layer in (model[1], model[5]):
        assert isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))
        nn.init.normal_(layer.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(layer.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return model.eval().requires_grad_(False)


def test_loss_is_the_mean_over_members_of_the_sum_over_layers() -> None:
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    members = [member(0), member(1)]
    expected = torch.zeros(())
    for model in members:
        hidden = model[0](images)  # type: ignore[index]
        outputs = model[:5](images)  # type: ignore[index]
        for x, layer in ((hidden, model[1]), (outputs, model[5])):  # type: ignore[index]
            expected = expected + statistics_distance(x, layer.running_mean, layer.running_var) / 2
    with batchnorm_loss(members) as loss:
        for model in members:
            model(images)
        value = loss()
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value, images)
    assert float(gradient.abs().sum()) > 0


def test_hooks_are_gone_after_the_block_even_if_it_raises() -> None:
    model = member(0)
    with pytest.raises(KeyError), batchnorm_loss([model]):
        raise KeyError
    assert not any(layer._forward_pre_hooks for layer in model.modules())
