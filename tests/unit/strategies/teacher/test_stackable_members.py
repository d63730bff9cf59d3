"""Members that cannot be called as one: whatever form is asked for, each answers as it would alone."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from forward_backward import answers
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.teacher import calls as module
from strategies.teacher.calls import Call
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.grouped import StackedMembers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu(self.first(x.flatten(1))))
        return out


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(16, 16)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(x.flatten(1)))


class Closing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = lambda x: self.last(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.first(x.flatten(1))))
        return out


class Recurrent(Net):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cells = kind(4, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cells(x.flatten(1, 2))[0][:, -1])


class Attending(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer(self.tokens(x.flatten(1, 2))))


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out / 2 if bool((out > 0).any()) else out


class Adding(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 3)
        out += super().forward(x)
        return out


class Differing(Net):
    """The branch is decided by what a batched tensor tells of itself."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return -out if torch._C._functorch.is_batchedtensor(out) else out


NETS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "a function that closes over the model": Closing,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "attention": Attending,
    "a branch by values": Branching,
    "a sum in place": Adding,
    "another answer": Differing,
}


def members(make: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make().eval().requires_grad_(False) for _ in range(4)]


def stacked(nets: list[nn.Module]) -> Ensemble:
    return Ensemble(nets, Mean(), form="stacked", kinds=["net"] * len(nets))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("most", [2, 10])
@pytest.mark.parametrize("name", NETS)
def test_members_that_cannot_be_stacked_answer_as_they_do_alone(
    name: str, most: int, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", most)  # of 2, the first images of the second stack pass through a checkpoint
    nets = members(NETS[name])
    expected = answers(lambda x: torch.stack([net(x) for net in nets]), images)
    ensemble = stacked(nets)
    for ours, theirs in zip(answers(ensemble.member_logits, images), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.member_logits(images), expected[0], rtol=1e-5, atol=1e-6)


def stacks(calls: list[Call]) -> list[bool | None]:
    return [call._works for _, call in calls if isinstance(call, StackedMembers)]


def test_members_that_can_be_stacked_are_tried_once(images: Tensor) -> None:
    nets = members(Net)
    alone = [deepcopy(net) for net in nets]
    ensemble = stacked(nets)
    ensemble.member_logits(images[:0])
    assert stacks(ensemble._together) == [None]
    ensemble.member_logits(images)
    assert stacks(ensemble._together) == [True]
    for net in ensemble.members:
        net.forward = None  # type: ignore[assignment]
    expected = answers(lambda x: torch.stack([net(x) for net in alone]), images)
    for ours, theirs in zip(answers(ensemble.member_logits, images), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
