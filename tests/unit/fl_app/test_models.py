"""The registry of models: counts, shapes, errors, seeds, names."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_app.models import ARCHITECTURES, build, penultimate
from fl_app.vision import torchvision
from strategies.core.seeds import generator, seeded_torch

Shape = tuple[int, int, int]

# name -> (C, input shape, parameters), as published or measured on the published code.
COUNTS: dict[str, tuple[int, Shape, int]] = {
    "lenet5": (10, (1, 32, 32), 61_706),
    "cnn5": (10, (3, 32, 32), 319_242),
    "cnn5-wide": (100, (3, 32, 32), 1_097_188),
    "mnist-cnn": (10, (1, 28, 28), 29_034),
    "cnn1": (10, (3, 32, 32), 122_570),
    "cnn-torch": (10, (3, 32, 32), 62_006),
    "resnet18": (10, (3, 32, 32), 11_173_962),
    "resnet18-narrow": (10, (3, 32, 32), 1_094_750),
    "resnet34": (10, (3, 32, 32), 21_282_122),
    "resnet18-imagenet": (10, (3, 32, 32), 11_181_642),
    "resnet34-imagenet": (10, (3, 32, 32), 21_289_802),
    "wrn16-1": (10, (3, 32, 32), 175_066),
    "wrn40-1": (10, (3, 32, 32), 563_930),
    "vgg11": (10, (3, 32, 32), 9_231_114),
    "mobilenet": (10, (3, 32, 32), 1_528_106),
    "shufflenet": (10, (3, 32, 32), 1_263_854),
    "resnet8": (10, (3, 32, 32), 4_911_754),
    "resnet8-ds": (10, (3, 32, 32), 240_054),
}
# Length of the vector the last linear layer reads, at 32 pixels a side.
FEATURES = {
    "lenet5": 84,
    "cnn5": 2048,
    "cnn5-wide": 2048,
    "mnist-cnn": 2048,
    "cnn1": 64,
    "cnn-torch": 84,
    "resnet18": 512,
    "resnet18-narrow": 160,
    "resnet34": 512,
    "resnet18-imagenet": 512,
    "resnet34-imagenet": 512,
    "wrn16-1": 64,
    "wrn40-1": 64,
    "vgg11": 512,
    "mobilenet": 1024,
    "shufflenet": 1024,
    "resnet8": 2048,
    "resnet8-ds": 448,
}
# Those of images; the others are in test_models_tabular.py.
IMAGES = tuple(name for name in ARCHITECTURES if name not in ("logistic", "mlp", "text-bag"))
ALL = pytest.mark.parametrize("name", IMAGES)


def seeded(name: str, shape: Shape, seed: int = 0, num_classes: int = 10) -> nn.Module:
    with seeded_torch(seed, "init"):
        return build(name, num_classes=num_classes, input_shape=shape)


def skeleton(name: str, shape: Shape, num_classes: int = 10) -> nn.Module:
    """Build without memory or draws: for counts and names."""
    with torch.device("meta"):
        return build(name, num_classes=num_classes, input_shape=shape)


def images(shape: Shape, count: int = 2) -> torch.Tensor:
    return torch.randn(count, *shape, generator=generator(0, "images"))


def test_architectures_are_those_with_a_published_count() -> None:
    assert set(IMAGES) == set(COUNTS) == set(FEATURES)


@ALL
def test_parameters_of_the_published_form_are_as_many_as_published(name: str) -> None:
    num_classes, shape, count = COUNTS[name]
    assert sum(p.numel() for p in skeleton(name, shape, num_classes).parameters()) == count


@ALL
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_forward_of_usual_images_returns_finite_logits(name: str, shape: Shape) -> None:
    model = seeded(name, shape, num_classes=7).eval()
    with torch.no_grad():
        logits = model(images(shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])  # it reads its input


@ALL
def test_penultimate_reads_the_feature_vector_and_gives_the_logits(name: str) -> None:
    layer = penultimate(skeleton(name, (3, 32, 32), num_classes=7))
    assert (layer.in_features, layer.out_features) == (FEATURES[name], 7)


# Names: uploads and checkpoints are matched by them.


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lenet5", "conv1 conv2 fc1 fc2 fc3"),
        ("cnn-torch", "conv1 conv2 fc1 fc2 fc3"),
        ("cnn5", "conv1 conv2 conv3 fc"),
        ("cnn5-wide", "conv1 conv2 conv3 fc"),
        ("cnn1", "conv1 conv2 conv3 fc1 fc2"),
    ],
)
def test_state_keys_of_plain_nets_are_the_pinned_ones(name: str, layers: str) -> None:
    pinned = [f"{layer}.{kind}" for layer in layers.split() for kind in ("weight", "bias")]
    assert list(skeleton(name, (3, 32, 32)).state_dict()) == pinned


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("resnet18", "resnet18"),
        ("resnet34", "resnet34"),
        ("resnet18-imagenet", "resnet18"),
        ("resnet34-imagenet", "resnet34"),
        ("mobilenet", "mobilenet_v3_small"),
        ("shufflenet", "shufflenet_v2_x1_0"),
    ],
)
def test_state_keys_of_torchvisions_nets_are_torchvisions(name: str, original: str) -> None:
    with torch.device("meta"):
        keys = list(getattr(torchvision.models, original)().state_dict())
    assert list(skeleton(name, (3, 32, 32)).state_dict()) == keys


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("mnist-cnn", "conv1 bn1 conv2 bn2 fc"),
        (
            "vgg11",
            " ".join(f"features.{n}" for n in (0, 1, 4, 5, 8, 9, 11, 12, 15, 16, 18, 19, 22, 23, 25, 26))
            + " classifier",
        ),
        (
            "resnet8",
            "conv1 bn1 layer1.conv1 layer1.bn1 layer1.conv2 layer1.bn2 "
            "layer2.conv1 layer2.bn1 layer2.conv2 layer2.bn2 layer2.downsample.0 layer2.downsample.1 "
            "layer3.conv1 layer3.bn1 layer3.conv2 layer3.bn2 layer3.downsample.0 layer3.downsample.1 fc",
        ),
        (
            "wrn16-1",
            "conv1 group1.0.bn1 group1.0.conv1 group1.0.bn2 group1.0.conv2 group1.1.bn1 group1.1.conv1 group1.1.bn2 "
            "group1.1.conv2 group2.0.bn1 group2.0.conv1 group2.0.bn2 group2.0.conv2 group2.0.shortcut group2.1.bn1 "
            "group2.1.conv1 group2.1.bn2 group2.1.conv2 group3.0.bn1 group3.0.conv1 group3.0.bn2 group3.0.conv2 "
            "group3.0.shortcut group3.1.bn1 group3.1.conv1 group3.1.bn2 group3.1.conv2 bn fc",
        ),
    ],
)
def test_state_prefixes_of_our_normalised_nets_are_the_pinned_ones(name: str, prefixes: str) -> None:
    found = dict.fromkeys(key.rpartition(".")[0] for key in skeleton(name, (3, 32, 32)).state_dict())
    assert list(found) == prefixes.split()


@pytest.mark.slow
def test_small_nets_are_built_without_importing_torchvision() -> None:
    root = Path(__file__).parents[3]
    code = f"""
import sys
sys.path.insert(0, {str(root)!r})
from fl_app.models import build, builders
builders(10, (1, 28, 28))
build("lenet5", num_classes=10, input_shape=(1, 28, 28))
sys.exit("torchvision" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
