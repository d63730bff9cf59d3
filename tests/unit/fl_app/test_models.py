"""The registry of models: counts, shapes, errors, seeds, names."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_app.models import ARCHITECTURES, build, builders, penultimate
from fl_app.vision import torchvision
from strategies.core.errors import OptionError
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
MIN_SIDE = {"lenet5": 4, "mnist-cnn": 4, "cnn-torch": 16, "cnn5": 18, "cnn5-wide": 18, "cnn1": 18}
# Those of images; the others are in test_models_tabular.py.
IMAGES = tuple(name for name in ARCHITECTURES if name not in ("logistic", "mlp", "text-bag"))
ALL = pytest.mark.parametrize("name", IMAGES)
# The two of depth 34 take long to draw and differ from those of 18 in their counts only.
QUICK = pytest.mark.parametrize("name", [name for name in IMAGES if "34" not in name])


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


@QUICK
def test_training_step_at_the_smallest_side_reaches_every_parameter(name: str) -> None:
    side = MIN_SIDE.get(name, 8)
    model = seeded(name, (1, side, side))
    x = images((1, side, side), count=4).requires_grad_()
    F.cross_entropy(model(x), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@ALL
def test_build_below_the_smallest_side_is_refused_with_the_remedy(name: str) -> None:
    side = MIN_SIDE.get(name, 8) - 1
    with pytest.raises(OptionError) as caught:
        build(name, num_classes=10, input_shape=(3, side, side))
    assert repr(name) in str(caught.value)
    assert str((3, side, side)) in str(caught.value)
    assert f"at least {side + 1} pixels" in str(caught.value)


@pytest.mark.parametrize("name", ["lenet5", "resnet8-ds", "wrn16-1", "vgg11", "resnet18-imagenet"])
@pytest.mark.parametrize("side", [16, 33, 64])
def test_forward_of_other_sizes_returns_logits(name: str, side: int) -> None:
    model = seeded(name, (3, side, side)).eval()
    with torch.no_grad():
        assert model(images((3, side, side))).shape == (2, 10)


@pytest.mark.parametrize("shape", [(2, 32, 32), (3, 32, 28), (32, 32), (0, 32, 32), (1, 0, 0), (1, -8, -8)])
def test_build_for_a_shape_that_no_net_takes_is_refused(shape: Shape) -> None:
    for attempt in (lambda: build("resnet18", num_classes=10, input_shape=shape), lambda: builders(10, shape)):
        with pytest.raises(OptionError) as caught:
            attempt()
        assert str(shape) in str(caught.value)
        assert "1 or 3 channels" in str(caught.value)


def test_build_of_an_unknown_name_names_it_and_the_known_ones() -> None:
    with pytest.raises(OptionError) as caught:
        build("resnet19", num_classes=10, input_shape=(3, 32, 32))
    assert "'resnet19'" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_build_for_no_class_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'lenet5' cannot tell 0 classes apart: must be at least 1"):
        build("lenet5", num_classes=0, input_shape=(1, 28, 28))


@QUICK
def test_build_with_one_seed_gives_one_model(name: str) -> None:
    side = MIN_SIDE.get(name, 8)
    x = images((3, side, side))
    with torch.no_grad():
        first, again, other = (seeded(name, (3, side, side), seed).eval()(x) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_builders_after_pickling_build_the_same_models() -> None:
    made = builders(10, (1, 8, 8))
    for name, builder in pickle.loads(pickle.dumps(made)).items():  # noqa: S301  our own bytes
        if "34" not in name:
            with seeded_torch(0, "init"):
                mine = builder()
            reference = seeded(name, (1, 8, 8)).state_dict()
            assert all(torch.equal(value, reference[key]) for key, value in mine.state_dict().items())


def test_builders_hold_exactly_the_architectures_that_take_the_images() -> None:
    assert tuple(builders(10, (3, 32, 32))) == IMAGES
    assert set(builders(10, (1, 8, 8))) == {n for n in IMAGES if MIN_SIDE.get(n, 8) <= 8}
    assert set(builders(10, (1, 4, 4))) == {"lenet5", "mnist-cnn"}


@ALL
def test_penultimate_reads_the_feature_vector_and_gives_the_logits(name: str) -> None:
    layer = penultimate(skeleton(name, (3, 32, 32), num_classes=7))
    assert (layer.in_features, layer.out_features) == (FEATURES[name], 7)


def test_penultimate_output_in_a_forward_is_the_logits() -> None:
    seen: list[torch.Tensor] = []
    for name in ("lenet5", "vgg11", "mobilenet"):
        model = seeded(name, (1, 8, 8)).eval()
        penultimate(model).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        assert torch.equal(model(images((1, 8, 8))), seen.pop())


def test_penultimate_of_a_model_without_linear_layer_is_refused() -> None:
    with pytest.raises(OptionError, match="Sequential has no linear layer"):
        penultimate(nn.Sequential(nn.Conv2d(1, 1, 1)))


# Names: uploads and checkpoints are matched by them.


@ALL
def test_state_keys_do_not_depend_on_images_or_classes(name: str) -> None:
    keys = list(skeleton(name, (3, 32, 32)).state_dict())
    assert list(skeleton(name, (1, 28, 28), num_classes=3).state_dict()) == keys


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
