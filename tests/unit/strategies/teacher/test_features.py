import torch
from torch import nn

from strategies.teacher.features import penultimate_features


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
    assert seen is not None
    torch.testing.assert_close(seen, (members[0][:3](X) + members[1][:3](X)) / 2)


def test_features_are_those_of_the_last_forward_pass_and_carry_gradients() -> None:
    one, images = member(0), X.clone().requires_grad_()
    with penultimate_features([one]) as features:
        one(torch.zeros_like(X))
        one(images)
        seen = features()
    assert seen is not None
    torch.testing.assert_close(seen, one[:3](X))
    (gradient,) = torch.autograd.grad(seen.abs().mean(), images)
    assert bool(gradient.any())
