"""What the nets compute and how they are drawn, against the published order of the layers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_app.models import build, builders, penultimate
from fl_app.models.wide_resnet import PreActivationBlock
from strategies.core.seeds import generator, seeded_torch

State = dict[str, torch.Tensor]
Shape = tuple[int, int, int]

IMAGES = tuple(builders(10, (3, 32, 32)))
HE_NORMAL = ("vgg11", "wrn16-1", "wrn40-1", "resnet18-imagenet", "resnet34-imagenet")


def seeded(name: str, shape: Shape, seed: int = 0) -> nn.Module:
    with seeded_torch(seed, "init"):
        return build(name, num_classes=10, input_shape=shape)


def skeleton(name: str, shape: Shape, num_classes: int = 10) -> nn.Module:
    """Build without memory or draws: for counts and names."""
    with torch.device("meta"):
        return build(name, num_classes=num_classes, input_shape=shape)


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


def test_lenet5_third_layer_is_drawn_as_the_published_convolution_is() -> None:
    with seeded_torch(0, "init"):
        published = [nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Conv2d(16, 120, 5)]
    state = seeded("lenet5", (1, 32, 32)).state_dict()
    for layer, convolution in zip(("conv1", "conv2", "fc1"), published, strict=True):
        assert convolution.bias is not None
        assert torch.equal(state[f"{layer}.weight"].flatten(1), convolution.weight.flatten(1))
        assert torch.equal(state[f"{layer}.bias"], convolution.bias)


def test_lenet5_for_28_pixels_is_the_net_for_32() -> None:
    small, large = (seeded("lenet5", (1, side, side)) for side in (28, 32))
    large.load_state_dict(small.state_dict())
    x = images((1, 28, 28))
    torch.testing.assert_close(small(x), large(F.pad(x, (2, 2, 2, 2))))


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


def test_wide_block_of_equal_width_adds_the_input_itself() -> None:
    block = PreActivationBlock(16, 16).eval()
    nn.init.zeros_(block.conv2.weight)
    x = images((16, 8, 8))
    assert torch.equal(block(x), x)


def test_resnet8_at_32_pixels_pools_by_four_as_published() -> None:
    model = seeded("resnet8-ds", (3, 32, 32)).eval()
    maps: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    model.get_submodule("layer3").register_forward_hook(lambda _m, _i, output: maps.append(output))
    model.get_submodule("flatten").register_forward_hook(lambda _m, _i, output: vectors.append(output))
    model(images((3, 32, 32)))
    torch.testing.assert_close(vectors[0], F.avg_pool2d(maps[0], 4).flatten(1))


@pytest.mark.parametrize(
    ("name", "layer", "side"),
    [
        ("resnet18", "layer1", 32),
        ("resnet18", "layer4", 4),
        ("resnet18-imagenet", "layer1", 8),
        ("vgg11", "features", 4),
    ],
)
def test_maps_of_32_pixel_images_have_the_published_side(name: str, layer: str, side: int) -> None:
    model = seeded(name, (3, 32, 32)).eval()
    maps: list[torch.Tensor] = []
    model.get_submodule(layer).register_forward_hook(lambda _m, _i, output: maps.append(output))
    with torch.no_grad():
        model(images((3, 32, 32), count=1))
    assert maps[0].shape[-1] == side


def test_vgg11_at_64_pixels_pools_once_more_and_keeps_its_names() -> None:
    small, large = (skeleton("vgg11", (3, side, side)) for side in (32, 64))
    assert [sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) for model in (small, large)] == [3, 4]
    assert list(small.state_dict()) == list(large.state_dict())


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


def test_vgg11_classifier_starts_small_and_unbiased() -> None:
    layer = penultimate(seeded("vgg11", (3, 32, 32)))
    assert float(layer.weight.detach().std()) == pytest.approx(0.01, rel=0.06)
    assert not layer.bias.any()


@pytest.mark.parametrize("name", [n for n in IMAGES if n not in (*HE_NORMAL, "resnet34")])
def test_weights_of_the_other_nets_follow_torchs_default_law(name: str) -> None:
    for module in seeded(name, (3, 32, 32)).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())  # U(-1/sqrt(fan_in), 1/sqrt(fan_in))
            largest = float(module.weight.detach().abs().max())
            assert largest <= bound * (1 + 1e-6)
            assert largest > 0.85 * bound


@pytest.mark.parametrize("name", IMAGES)
def test_normalisation_layers_start_neutral_with_torchs_momentum(name: str) -> None:
    model = seeded(name, (3, 32, 32)) if "34" not in name else skeleton(name, (3, 32, 32))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.momentum, module.eps) == (0.1, 1e-5)
            assert "34" in name or ((module.weight == 1).all() and not module.bias.any())
