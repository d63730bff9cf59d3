from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from forward_backward import answers
from torch import Tensor, fx, nn

from fl_app.models import build, builders
from strategies.combiners.combiners import Mean
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.frozen import simplified


def lively(model: nn.Module) -> nn.Module:
    """Give batch normalisation something to do."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(layer.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.1)
    return model.eval().requires_grad_(False)


def assert_equal(model: nn.Module, other: nn.Module, x: Tensor, tolerance: float = 0.0) -> None:
    for ours, theirs in zip(answers(other, x), answers(model, x), strict=True):
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def norms(model: nn.Module) -> int:
    return sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


class Net(nn.Module):
    """Convolution, normalisation and a linear layer, in a way that each test chooses."""

    def __init__(self, way: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.relu, self.pool = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        self.same = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.LazyLinear(3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.way(self, x).flatten(1))  # type: ignore[no-any-return]


def net(way: Callable[[Net, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = Net(way)
    model(images())
    return lively(model)


def images(side: int = 9) -> Tensor:
    return torch.randn(5, 1, side, side, generator=torch.Generator().manual_seed(0))


def targets(model: nn.Module) -> list[object]:
    assert isinstance(model, fx.GraphModule)
    return [node.target for node in model.graph.nodes]


LARGE = ("resnet18", "resnet34", "resnet18-imagenet", "resnet34-imagenet", "resnet8", "vgg11", "wrn40-1", "cnn5-wide")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in builders(4, (1, 20, 20))]
)
def test_simplified_model_of_the_zoo_agrees_in_logits_and_input_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = lively(build(name, num_classes=4, input_shape=(1, 20, 20))).double()
    x = torch.randn(2, 1, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_equal(model, simplified(model), x, tolerance=1e-10)


def test_simplified_resnet_in_single_precision_agrees_and_has_no_normalisation_left() -> None:
    torch.manual_seed(0)
    model = lively(build("resnet8", num_classes=4, input_shape=(1, 16, 16)))
    fast = simplified(model)
    assert norms(model) > 0
    assert norms(fast) == 0
    assert_equal(model, fast, images(16), tolerance=3e-6)


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "layers": lambda m, x: m.pool(m.relu(m.norm(m.conv(x)))),
    "functions": lambda m, x: F.max_pool2d(F.relu(m.norm(m.conv(x))), 3, 2, 1),
    "methods": lambda m, x: F.max_pool2d(input=m.conv(x).relu_(), kernel_size=(2, 3), ceil_mode=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_relu_before_max_pooling_moves_behind_it(way: str) -> None:
    model = net(WAYS[way])
    fast = simplified(model)
    order = [
        "relu" if "relu" in str(target) else "pool"
        for target in targets(fast)
        if "pool" in str(target) or "relu" in str(target)
    ]
    assert order == ["pool", "relu"]
    assert_equal(model, fast, images(), tolerance=1e-6)


def test_simplified_members_that_change_their_images_in_place_leave_them_to_the_others() -> None:
    def way(model: Net, x: Tensor) -> Tensor:
        x -= 0.5
        return model.norm(model.conv(x))  # type: ignore[no-any-return]

    model, x = net(way), images()
    expected = model(x.clone())
    fast = simplified(model)
    assert norms(fast) == 0
    for logits in Ensemble([fast, fast], Mean()).member_logits(x):
        torch.testing.assert_close(logits, expected)
    assert torch.equal(x, images())
    assert answers(fast, x)[1].any()
