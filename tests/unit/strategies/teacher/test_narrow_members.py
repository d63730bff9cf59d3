import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from forward_backward import answers
from torch import Tensor, fx, nn

from fl_app.models import build
from strategies.combiners.combiners import Mean
from strategies.core.facts import UploadFacts
from strategies.method import Upload
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.frozen import simplified
from strategies.teacher.grouped import NarrowMembers, narrow_layer


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
WIDE: dict[str, Callable[[], nn.Module]] = {
    "eight channels": lambda: net(nn.Conv2d(2, 8, 3)),
    "groups": lambda: net(nn.Conv2d(2, 4, 3, groups=2)),
    "dilation": lambda: net(nn.Conv2d(2, 4, 3, dilation=2)),
    "padding by name": lambda: net(nn.Conv2d(2, 4, 3, padding="same")),
    "padding by reflection": lambda: net(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")),
    "no convolution": lambda: net(),
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
        found if isinstance(found := simplified(member), fx.GraphModule) else fx.symbolic_trace(member)
        for member in members
    ]
    joined = NarrowMembers(traced)
    for ours, theirs in zip(answers(joined, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(joined(x), expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WIDE)
def test_other_first_layers_stay_as_they_are(name: str) -> None:
    assert narrow_layer(fx.symbolic_trace(drawn(WIDE[name], 0))) is None


def test_what_only_some_members_share_runs_with_the_rest_of_each() -> None:
    members = [drawn(NETS["pool and ReLU"], seed) for seed in range(2)]
    joined = NarrowMembers([fx.symbolic_trace(member) for member in members])
    # Without rewriting, pooling is a layer that is not known to be channel by channel.
    called = [[str(node.target) for node in rest.graph.nodes if node.op == "call_module"] for rest in joined._rests]
    assert called == [["1", "2", "3", "4"]] * 2


def lenets(count: int) -> tuple[list[Upload], dict[str, Callable[[], nn.Module]]]:
    def upload(number: int) -> Upload:
        name = "lenet5" if number % 2 == 0 else "mnist-cnn"
        torch.manual_seed(number)
        return Upload(UploadFacts(f"c{number}", name), builders[name]().state_dict)

    builders = {name: partial(build, name, num_classes=10, input_shape=(1, 28, 28)) for name in ("lenet5", "mnist-cnn")}
    return [upload(number) for number in range(count)], builders


def test_an_ensemble_joins_its_lenets_and_keeps_the_order_of_its_members() -> None:
    uploads, builders = lenets(5)
    fast, plain = (Ensemble.from_uploads(uploads, builders, Mean(), form=form) for form in ("auto", "loop"))
    assert [list(numbers) for numbers, _ in fast._together] == [[0, 2, 4], [1], [3]]
    x = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(answers(fast.member_logits, x), answers(plain.member_logits, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_member_that_is_watched_is_called_alone() -> None:
    uploads, builders = lenets(3)
    ensemble = Ensemble.from_uploads(uploads, builders, Mean())
    seen: list[Tensor] = []
    x = torch.rand(2, 1, 28, 28)
    expected = ensemble.member_logits(x)
    ensemble.members[2].register_forward_hook(lambda *given: seen.append(given[2]))
    torch.testing.assert_close(ensemble.member_logits(x), expected, rtol=1e-5, atol=1e-6)
    assert len(seen) == 1


def test_second_derivatives_pass() -> None:
    members = [drawn(NETS["pool and ReLU"], seed) for seed in range(2)]
    joined = NarrowMembers([fx.symbolic_trace(member) for member in members])

    def bent(call: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.linspace(0, 1, 4 * 2 * 11 * 9).reshape(4, 2, 11, 9).requires_grad_()
        (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    torch.testing.assert_close(bent(joined), bent(partial(one_by_one, members)), rtol=1e-4, atol=1e-5)


def joined(*seeds: int) -> Ensemble:
    members = [simplified(drawn(NETS["pool and ReLU"], seed)) for seed in seeds]
    return Ensemble(members, Mean(), kinds=["net"] * len(members))


def test_joined_layers_follow_the_weights_that_are_loaded_cast_or_moved() -> None:
    x = torch.rand(4, 2, 11, 9)
    ensemble, other = joined(0, 1), joined(2, 3)
    assert isinstance(ensemble._together[0][1], NarrowMembers)
    ensemble.load_state_dict(other.state_dict())
    assert torch.equal(ensemble(x), other(x))
    torch.testing.assert_close(ensemble.double()(x.double()), other(x))
    assert ensemble.to("meta")(x.to("meta").double()).device.type == "meta"


def test_an_ensemble_with_joined_layers_is_saved_and_loaded_as_a_whole() -> None:
    x, ensemble, file = torch.rand(4, 2, 11, 9), joined(0, 1), io.BytesIO()
    torch.save(ensemble, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), ensemble(x))
