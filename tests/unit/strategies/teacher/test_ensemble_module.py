from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from forward_backward import answers
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.core.facts import UploadFacts
from strategies.method import Upload
from strategies.teacher import calls as module
from strategies.teacher.calls import Call, StackedMembers, recompute_backward
from strategies.teacher.ensemble import Ensemble


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("before", [(), (nn.Flatten(),), (nn.Identity(), nn.Dropout())])
def test_a_first_layer_that_works_in_place_leaves_the_images_to_the_other_members(
    images: torch.Tensor, before: tuple[nn.Module, ...]
) -> None:
    def small(*, inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*before, nn.LeakyReLU(0.5, inplace=inplace), nn.Flatten(), nn.Linear(64, 3))

    inputs = images - 0.5
    expected = small(inplace=False).eval()(inputs)
    ensemble = Ensemble([small(inplace=True) for _ in range(2)], Mean())
    for logits in ensemble.member_logits(inputs):
        torch.testing.assert_close(logits, expected)
    assert torch.equal(inputs, images - 0.5)


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


# Members that cannot be called as one: whatever form is asked for, each answers as it would alone.


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
def images_members() -> Tensor:
    return torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("most", [2, 10])
@pytest.mark.parametrize("name", NETS)
def test_members_that_cannot_be_stacked_answer_as_they_do_alone(
    name: str, most: int, images_members: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", most)  # of 2, the first images of the second stack pass through a checkpoint
    nets = members(NETS[name])
    expected = answers(lambda x: torch.stack([net(x) for net in nets]), images_members)
    ensemble = stacked(nets)
    for ours, theirs in zip(answers(ensemble.member_logits, images_members), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.member_logits(images_members), expected[0], rtol=1e-5, atol=1e-6)


def stacks(calls: list[Call]) -> list[bool | None]:
    return [call._works for _, call in calls if isinstance(call, StackedMembers)]


def test_members_that_can_be_stacked_are_tried_once(images_members: Tensor) -> None:
    nets = members(Net)
    alone = [deepcopy(net) for net in nets]
    ensemble = stacked(nets)
    ensemble.member_logits(images_members[:0])
    assert stacks(ensemble._together) == [None]
    ensemble.member_logits(images_members)
    assert stacks(ensemble._together) == [True]
    for net in ensemble.members:
        net.forward = None  # type: ignore[assignment]
    expected = answers(lambda x: torch.stack([net(x) for net in alone]), images_members)
    for ours, theirs in zip(answers(ensemble.member_logits, images_members), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
