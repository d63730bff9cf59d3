from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forward_backward import answers
from torch import Tensor, nn

from fl_app.models import build, builders
from strategies.teacher.frozen import lean_max_pool2d, simplify


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


def images(side: int = 9) -> Tensor:
    return torch.randn(5, 1, side, side, generator=torch.Generator().manual_seed(0))


LARGE = ("resnet18", "resnet34", "resnet18-imagenet", "resnet34-imagenet", "resnet8", "vgg11", "wrn40-1", "cnn5-wide")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in builders(4, (1, 20, 20))]
)
def test_simplified_model_of_the_zoo_agrees_in_logits_and_input_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = lively(build(name, num_classes=4, input_shape=(1, 20, 20))).double()
    x = torch.randn(2, 1, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_equal(model, simplify(model), x, tolerance=1e-10)


def test_simplified_resnet_in_single_precision_agrees_and_has_no_normalisation_left() -> None:
    torch.manual_seed(0)
    model = lively(build("resnet8", num_classes=4, input_shape=(1, 16, 16)))
    fast = simplify(model)
    assert norms(model) > 0
    assert norms(fast) == 0
    assert_equal(model, fast, images(16), tolerance=3e-6)


WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (2, 1), "ceil_mode": True},
    {"kernel_size": 2, "dilation": 2},
]


def draw(*shape: int) -> Tensor:
    # Of few values, so that there are ties.
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_equals_torchs_to_the_bit_forward_and_backward(
    window: dict[str, Any], layout: torch.memory_format
) -> None:
    x = draw(3, 4, 9, 7).contiguous(memory_format=layout).requires_grad_()
    ours, theirs = lean_max_pool2d(x, **window), F.max_pool2d(x, **window)
    assert torch.equal(ours, theirs)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((pooled * weights).sum(), x)[0] for pooled in (ours, theirs)]
    assert torch.equal(*gradients)
    assert gradients[0].stride() == gradients[1].stride()


def test_pooling_keeps_a_twelfth_of_torch_s_memory() -> None:
    def kept(pool: Any) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            pool(draw(2, 8, 16, 16).requires_grad_(), 2)
        return sum(sizes)

    assert kept(lean_max_pool2d) * 12 == kept(F.max_pool2d)
