from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forward_backward import answers
from torch import Tensor, fx, nn

from strategies.combiners.combiners import Mean
from strategies.core.facts import UploadFacts
from strategies.method import Upload
from strategies.teacher import calls as module
from strategies.teacher.calls import Call, NarrowMembers, StackedMembers, recompute_backward
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.frozen import simplify


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


# Members of two kinds, which are called one by one, stacked, or computed again for the gradient.


def pooling_net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9 * width, 3),
    )


BUILDERS: dict[str, Callable[[], nn.Module]] = {"narrow": lambda: pooling_net(4), "wide": lambda: pooling_net(6)}


def uploads() -> list[Upload]:
    def upload(number: int) -> Upload:
        name = "wide" if number % 3 == 1 else "narrow"
        torch.manual_seed(number)
        model = BUILDERS[name]()
        nn.init.normal_(model[1].running_mean, std=0.2)  # type: ignore[index]
        nn.init.uniform_(model[1].running_var, 0.5, 2.0)  # type: ignore[index]
        return Upload(UploadFacts(f"c{number}", name), model.state_dict)

    return [upload(number) for number in range(5)]


def ensemble(**changes: object) -> Ensemble:
    return Ensemble.from_uploads(uploads(), BUILDERS, Mean(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["loop", "auto", "stacked"])
def test_recomputed_members_give_the_same_bits(form: str, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(ensemble(form=form).member_logits, images)
    monkeypatch.setattr(module, "recompute_backward", lambda *_: pytest.fail("all of them fit"))
    answers(ensemble(form="loop").member_logits, images)
    monkeypatch.undo()
    again: list[Tensor] = []
    monkeypatch.setattr(module, "recompute_backward", lambda call, x: again.append(x) or recompute_backward(call, x))
    monkeypatch.setattr(module, "KEPT", 3)  # as many as the larger kind has, so that the groups stay as they were
    for ours, theirs in zip(answers(ensemble(form=form).member_logits, images), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(again) == (2 if form == "loop" else 1)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("most", [1, 2, 10])
def test_stacked_members_equal_the_loop(fold: bool, most: int, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", most)
    model = ensemble(form="stacked", fold=fold)
    assert len(model._together) == {1: 5, 2: 3, 10: 2}[most]
    model.member_logits(images)
    assert all(isinstance(call, StackedMembers) and call._works for _, call in model._together)
    for ours, theirs in zip(
        answers(model.member_logits, images), answers(ensemble(fold=fold).member_logits, images), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# Members that differ in what they do: whatever form is asked for, each answers as it would alone.


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


class Viewing(nn.Module):
    """The convolutions and the ``view`` of PyTorch's tutorial net, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(F.relu(self.norm(self.first(x))), 2).view(-1, 4))  # type: ignore[no-any-return]


class Changing(Viewing):
    """Centres its images where they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(3.0).div_(2.0))


class Gated(Viewing):
    """What it computes follows from a buffer's value, which each model has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("open", torch.rand(()) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.open else -1)


def in_place_after(*before: nn.Module) -> nn.Module:
    return nn.Sequential(*before, nn.LeakyReLU(0.5, inplace=True), nn.Flatten(), nn.Linear(16, 3))


NETS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "a function that closes over the model": Closing,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "attention": Attending,
    "a branch by values": Branching,
    "a sum in place": Adding,
    "another answer": Differing,
    "a view": Viewing,
    "images in place": Changing,
    "a branch by a buffer": Gated,
    "a first layer in place": in_place_after,
    "flat images in place": lambda: in_place_after(nn.Flatten()),
    "the same images in place": lambda: in_place_after(nn.Identity(), nn.Dropout()),
}


def members(build: Callable[[], nn.Module]) -> list[nn.Module]:
    """Return four members whose running statistics, if any, have moved."""
    torch.manual_seed(0)
    nets = [build() for _ in range(4)]
    for net in nets:
        net(torch.randn(9, 1, 4, 4))
    return [net.eval().requires_grad_(False) for net in nets]


def one_by_one(nets: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([net(x.clone()) for net in nets])


def ensemble_of(nets: list[nn.Module], build: Callable[[], nn.Module], **how: Any) -> Ensemble:
    given = [Upload(UploadFacts(f"c{k}", "net"), net.state_dict) for k, net in enumerate(nets)]
    return Ensemble.from_uploads(given, {"net": build}, Mean(), **how)


@pytest.fixture
def images_members() -> Tensor:
    return torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("form", ["auto", "loop", "stacked"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("most", [2, 10])
@pytest.mark.parametrize("name", NETS)
def test_members_answer_as_they_do_alone(
    name: str, most: int, fold: bool, form: str, images_members: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", most)  # of 2, the first images of the second stack pass through a checkpoint
    nets, before = members(NETS[name]), images_members.clone()
    expected = answers(one_by_one(nets), images_members)
    ensemble = ensemble_of(nets, NETS[name], form=form, fold=fold)
    for ours, theirs in zip(answers(ensemble.member_logits, images_members), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.member_logits(images_members), expected[0], rtol=1e-5, atol=1e-5)
        part = ensemble.member_logits(images_members, slice(1, 3))
    torch.testing.assert_close(part, expected[0][1:3], rtol=1e-5, atol=1e-5)
    assert torch.equal(images_members, before)


def stacks(calls: list[Call]) -> list[bool | None]:
    return [call._works for _, call in calls if isinstance(call, StackedMembers)]


def test_members_that_can_be_stacked_are_tried_once(images_members: Tensor) -> None:
    nets = members(Net)
    ensemble = ensemble_of(nets, Net, form="stacked", fold=False)
    ensemble.member_logits(images_members[:0])
    assert stacks(ensemble._together) == [None]
    ensemble.member_logits(images_members)
    assert stacks(ensemble._together) == [True]
    for net in ensemble.members:
        net.forward = None  # type: ignore[assignment]
    expected = answers(one_by_one(nets), images_members)
    for ours, theirs in zip(answers(ensemble.member_logits, images_members), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# Members whose first layers are joined.


class Skip(nn.Module):
    """Two layers read what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return (x + self.second(x)).mean((2, 3))


def after(*first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Flatten(), nn.LazyLinear(4))


FIRST: dict[str, Callable[[], nn.Module]] = {
    "pool and ReLU": lambda: after(nn.Conv2d(2, 6, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
    "ReLU, then pool": lambda: after(nn.Conv2d(2, 7, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)),
    "normalisation": lambda: after(nn.Conv2d(2, 3, 3, padding=2), nn.BatchNorm2d(3), nn.ReLU()),
    "no bias, strides": lambda: after(nn.Conv2d(2, 1, (3, 5), stride=(2, 3), padding=(0, 2), bias=False)),
    "two convolutions": lambda: after(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU()),
    "a sum": Skip,
    "mean pooling": lambda: after(nn.Conv2d(2, 6, 3), nn.AvgPool2d(2)),
}


def drawn(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    model(torch.rand(4, 2, 11, 9))  # lazy layers find their size, running statistics move
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("channels_last", [False, True])
def test_joined_first_layers_equal_the_members_as_they_came(name: str, channels_last: bool) -> None:
    members = [drawn(FIRST[name], seed) for seed in range(3)]
    x = torch.rand(4, 2, 11, 9, generator=torch.Generator().manual_seed(3))
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    expected = answers(one_by_one(members), x)
    traced = [
        found if isinstance(found := simplify(member), fx.GraphModule) else fx.symbolic_trace(member)
        for member in members
    ]
    joined = NarrowMembers(traced)
    for ours, theirs in zip(answers(joined, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(joined(x), expected[0], rtol=1e-5, atol=1e-6)
