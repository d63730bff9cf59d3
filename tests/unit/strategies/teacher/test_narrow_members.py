from collections.abc import Callable
from functools import partial

import pytest
import torch
from forward_backward import answers
from torch import Tensor, fx, nn

from strategies.teacher.calls import NarrowMembers
from strategies.teacher.frozen import simplify


class Skip(nn.Module):
    """Two layers read what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return (x + self.second(x)).mean((2, 3))


def net(*first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Flatten(), nn.LazyLinear(4))


NETS: dict[str, Callable[[], nn.Module]] = {
    "pool and ReLU": lambda: net(nn.Conv2d(2, 6, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
    "ReLU, then pool": lambda: net(nn.Conv2d(2, 7, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)),
    "normalisation": lambda: net(nn.Conv2d(2, 3, 3, padding=2), nn.BatchNorm2d(3), nn.ReLU()),
    "no bias, strides": lambda: net(nn.Conv2d(2, 1, (3, 5), stride=(2, 3), padding=(0, 2), bias=False)),
    "two convolutions": lambda: net(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU()),
    "a sum": Skip,
    "mean pooling": lambda: net(nn.Conv2d(2, 6, 3), nn.AvgPool2d(2)),
}


def drawn(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    model(torch.rand(4, 2, 11, 9))  # lazy layers find their size, running statistics move
    return model.eval().requires_grad_(False)


def one_by_one(members: list[nn.Module], x: Tensor) -> Tensor:
    return torch.stack([member(x) for member in members])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_joined_first_layers_equal_the_members_as_they_came(name: str, channels_last: bool) -> None:
    members = [drawn(NETS[name], seed) for seed in range(3)]
    x = torch.rand(4, 2, 11, 9, generator=torch.Generator().manual_seed(3))
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    expected = answers(partial(one_by_one, members), x)
    traced = [
        found if isinstance(found := simplify(member), fx.GraphModule) else fx.symbolic_trace(member)
        for member in members
    ]
    joined = NarrowMembers(traced)
    for ours, theirs in zip(answers(joined, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(joined(x), expected[0], rtol=1e-5, atol=1e-6)
