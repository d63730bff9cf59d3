"""What the nets compute and how they are drawn, against the published order of the layers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_app.models import build
from fl_app.models.wide_resnet import PreActivationBlock
from strategies.core.seeds import generator, seeded_torch

State = dict[str, torch.Tensor]
Shape = tuple[int, int, int]


def seeded(name: str, shape: Shape, seed: int = 0) -> nn.Module:
    with seeded_torch(seed, "init"):
        return build(name, num_classes=10, input_shape=shape)


def images(shape: Shape, count: int = 2) -> torch.Tensor:
    return torch.randn(count, *shape, generator=generator(0, "images"))


def pooled(x: torch.Tensor, state: State, layer: str, padding: int = 0) -> torch.Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, state[f"{layer}.weight"], state[f"{layer}.bias"], padding=padding)), 2)


def linear(x: torch.Tensor, state: State, layer: str) -> torch.Tensor:
    return F.linear(x, state[f"{layer}.weight"], state[f"{layer}.bias"])


@pytest.mark.parametrize(("side", "paddings"), [(32, (0, 0)), (31, (2, 0)), (28, (2, 0)), (27, (2, 2)), (8, (2, 2))])
def test_lenet5_equals_the_published_net_whose_third_layer_is_a_convolution(
    side: int, paddings: tuple[int, int]
) -> None:
    model = seeded("lenet5", (1, side, side))
    x, state = images((1, side, side)), model.state_dict()
    maps = pooled(pooled(x, state, "conv1", paddings[0]), state, "conv2", paddings[1])
    kernel = state["fc1.weight"].view(120, 16, *maps.shape[2:])
    feature = F.relu(F.conv2d(maps, kernel, state["fc1.bias"])).flatten(1)
    logits = linear(F.relu(linear(feature, state, "fc2")), state, "fc3")
    torch.testing.assert_close(model(x), logits)


@pytest.mark.parametrize(("name", "head"), [("cnn5", ["fc"]), ("cnn5-wide", ["fc"]), ("cnn1", ["fc1", "fc2"])])
def test_cnn5_family_equals_the_published_order_of_layers(name: str, head: list[str]) -> None:
    model = seeded(name, (3, 32, 32))
    x, state = images((3, 32, 32)), model.state_dict()
    maps = pooled(pooled(x, state, "conv1"), state, "conv2")
    feature = F.relu(F.conv2d(maps, state["conv3.weight"], state["conv3.bias"])).flatten(1)
    for layer in head[:-1]:
        feature = F.relu(linear(feature, state, layer))
    torch.testing.assert_close(model(x), linear(feature, state, head[-1]))


def test_mnist_cnn_equals_the_published_order_of_layers() -> None:
    model = seeded("mnist-cnn", (1, 28, 28)).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if "running" in key:
                value.uniform_(0.5, 2.0, generator=generator(0, key))
    x = images((1, 28, 28))
    state = model.state_dict()
    for n in "12":
        x = F.conv2d(x, state[f"conv{n}.weight"], state[f"conv{n}.bias"], padding=2)
        mean, variance = state[f"bn{n}.running_mean"], state[f"bn{n}.running_var"]
        x = F.max_pool2d(F.relu(F.batch_norm(x, mean, variance, state[f"bn{n}.weight"], state[f"bn{n}.bias"])), 2)
    torch.testing.assert_close(model(images((1, 28, 28))), linear(x.flatten(1), state, "fc"))


def test_wide_block_of_new_width_puts_the_normalised_input_on_the_shortcut() -> None:
    with seeded_torch(0):
        block = PreActivationBlock(16, 32, stride=2).eval()
    x, state = images((16, 8, 8)), block.state_dict()
    x_before = x.clone()
    h = F.relu(x / math.sqrt(1 + 1e-5))  # fresh statistics: mean 0, variance 1
    inner = F.relu(F.conv2d(h, state["conv1.weight"], stride=2, padding=1) / math.sqrt(1 + 1e-5))
    expected = F.conv2d(inner, state["conv2.weight"], padding=1) + F.conv2d(h, state["shortcut.weight"], stride=2)
    torch.testing.assert_close(block(x), expected)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("name", ["vgg11", "wrn16-1", "resnet18-imagenet"])
def test_convolutions_of_he_normal_nets_have_the_stated_deviation(name: str) -> None:
    for channels in (1, 3):
        model = seeded(name, (channels, 32, 32))
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                kernel = module.kernel_size[0]
                stated = math.sqrt(2 / (kernel * kernel * module.out_channels))
                # Five standard errors of an estimated deviation.
                tolerance = 5 * stated / math.sqrt(2 * module.weight.numel())
                assert float(module.weight.detach().std()) == pytest.approx(stated, abs=tolerance)
                assert module.bias is None or not module.bias.any()
