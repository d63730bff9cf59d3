"""The registry of models: counts, shapes, errors, seeds, names."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from fl_app.data.text import BUCKETS, LENGTH, tokens
from fl_app.models import ARCHITECTURES, build, penultimate, wordllama
from fl_app.models.backbones import backbone_of
from fl_app.models.client_nets import CUTS, cut
from fl_app.models.uploaded import uploaded_builders
from strategies.core.errors import OptionError
from strategies.core.seeds import generator, seeded_torch

Shape = tuple[int, int, int]

# name -> (C, input shape, parameters), as published or measured on the published code, and the length of the vector
# that the last linear layer reads at 32 pixels a side.
NETS: dict[str, tuple[int, Shape, int, int]] = {
    "lenet5": (10, (1, 32, 32), 61_706, 84),
    "cnn5": (10, (3, 32, 32), 319_242, 2048),
    "cnn5-wide": (100, (3, 32, 32), 1_097_188, 2048),
    "mnist-cnn": (10, (1, 28, 28), 29_034, 2048),
    "cnn1": (10, (3, 32, 32), 122_570, 64),
    "cnn-torch": (10, (3, 32, 32), 62_006, 84),
    "resnet18": (10, (3, 32, 32), 11_173_962, 512),
    "resnet18-narrow": (10, (3, 32, 32), 1_094_750, 160),
    "resnet34": (10, (3, 32, 32), 21_282_122, 512),
    "resnet18-imagenet": (10, (3, 32, 32), 11_181_642, 512),
    "resnet34-imagenet": (10, (3, 32, 32), 21_289_802, 512),
    "wrn16-1": (10, (3, 32, 32), 175_066, 64),
    "wrn40-1": (10, (3, 32, 32), 563_930, 64),
    "vgg11": (10, (3, 32, 32), 9_231_114, 512),
    "mobilenet": (10, (3, 32, 32), 1_528_106, 1024),
    "shufflenet": (10, (3, 32, 32), 1_263_854, 1024),
    "resnet8": (10, (3, 32, 32), 4_911_754, 2048),
    "resnet8-ds": (10, (3, 32, 32), 240_054, 448),
}
# Those of images.
IMAGES = tuple(name for name in ARCHITECTURES if name not in ("logistic", "mlp", "text-bag"))
ALL = pytest.mark.parametrize("name", IMAGES)
ROW, TEXT = (13, 1, 1), (1, 1, LENGTH)
# SHA-256 of the names of a model's state, line by line: uploads and checkpoints are matched by them.
NAMES = {
    "lenet5": "3fce4212", "cnn5": "5db9daf9", "cnn5-wide": "5db9daf9", "mnist-cnn": "eab9af6c", "cnn1": "5da3ff78",
    "cnn-torch": "3fce4212", "resnet18": "779447cf", "resnet18-narrow": "779447cf", "resnet34": "5aa6d497",
    "resnet18-imagenet": "779447cf", "resnet34-imagenet": "5aa6d497", "wrn16-1": "4374703f", "wrn40-1": "00495abf",
    "vgg11": "45f01fa0", "mobilenet": "5b6a84aa", "shufflenet": "7ba0fc3e", "resnet8": "e32e8b4f",
    "resnet8-ds": "e32e8b4f", "logistic": "d4999d43", "mlp": "0b5e7882", "text-bag": "e591717f",
}  # fmt: skip


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
    assert set(IMAGES) == set(NETS)


@ALL
def test_parameters_of_the_published_form_are_as_many_as_published(name: str) -> None:
    num_classes, shape, count, _ = NETS[name]
    assert sum(p.numel() for p in skeleton(name, shape, num_classes).parameters()) == count


@ALL
def test_forward_of_usual_images_returns_finite_logits(name: str) -> None:
    shape = (1, 28, 28)
    model = seeded(name, shape, num_classes=7).eval()
    with torch.no_grad():
        logits = model(images(shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])  # it reads its input


@ALL
def test_penultimate_reads_the_feature_vector_and_gives_the_logits(name: str) -> None:
    layer = penultimate(skeleton(name, (3, 32, 32), num_classes=7))
    assert (layer.in_features, layer.out_features) == (NETS[name][3], 7)


@pytest.mark.parametrize("name", NAMES)
def test_state_keys_are_the_pinned_ones(name: str) -> None:
    shape = {"logistic": ROW, "mlp": ROW, "text-bag": TEXT}.get(name, (3, 32, 32))
    keys = "\n".join(skeleton(name, shape, 2).state_dict())
    assert hashlib.sha256(keys.encode()).hexdigest()[:8] == NAMES[name]


# What the nets compute and how they are drawn, against the published order of the layers.


State = dict[str, torch.Tensor]


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


# Classifiers cut into blocks, and FuseFL's narrow ResNet.


BOTH = [(name, blocks) for name, cuts in CUTS.items() for blocks in cuts if name != "resnet18"]  # as the narrow one


@pytest.mark.parametrize(("name", "blocks"), BOTH)
def test_cut_model_has_the_blocks_and_the_logits_of_the_whole(name: str, blocks: int) -> None:
    model = build(name, num_classes=4, input_shape=(3, 16, 16)).eval()
    images = torch.randn(2, 3, 16, 16)
    expected = model(images)

    parts = cut(name, model, blocks)

    assert [child for child, _ in parts.named_children()] == [*map(str, range(blocks)), "classifier"]
    torch.testing.assert_close(parts(images), expected)
    assert [parts[:number](images).dim() for number in range(1, blocks + 1)] == [4] * (blocks - 1) + [2]


def test_models_that_cannot_be_cut_are_refused_and_not_accepted() -> None:
    with pytest.raises(
        OptionError, match=r"'lenet5' cannot be cut into 4 blocks .*: must be lenet5 into 2; .* into 2, 4"
    ):
        cut("lenet5", build("lenet5", num_classes=10, input_shape=(1, 28, 28)), 4)

    accepted = {blocks: set(uploaded_builders("block", 10, (3, 32, 32), blocks=blocks)) for blocks in (2, 4)}

    assert accepted[2] == {f"{name}+block" for name in CUTS}
    assert accepted[4] == {"resnet18+block", "resnet18-narrow+block"}


# Models of rows and of texts: formulas, shapes, what they refuse, and how they go through training and ensembles.


def test_text_bag_is_the_mean_of_the_words_whatever_their_order() -> None:
    model = seeded("text-bag", TEXT, num_classes=4).eval()
    texts = tokens(["one two three", "three one two", "one", ""])
    vectors = model.get_submodule("words")(texts)
    table = dict(model.named_parameters())["words.embedding.weight"]

    assert table.shape == (BUCKETS, 64)
    assert torch.allclose(vectors[0], table[texts[0, 0, 0, :3]].mean(0))
    assert torch.allclose(vectors[0], vectors[1])
    assert torch.equal(vectors[2], table[texts[2, 0, 0, 0]])
    assert torch.equal(vectors[3], torch.zeros(64))
    assert model(texts).isfinite().all()


@pytest.mark.parametrize(
    ("name", "shape", "allowed"),
    [
        ("mlp", (3, 32, 32), "rows, (features, 1, 1)"),
        ("mlp", (0, 1, 1), "rows, (features, 1, 1)"),
        ("text-bag", ROW, "texts, (1, 1, tokens)"),
        ("text-bag", (1, 8, 8), "texts, (1, 1, tokens)"),
        ("lenet5", ROW, "1 or 3 channels"),
        ("lenet5", TEXT, "1 or 3 channels"),
    ],
)
def test_examples_of_another_kind_are_refused(name: str, shape: tuple[int, int, int], allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        build(name, num_classes=2, input_shape=shape)
    assert f"architecture '{name}' cannot take examples of shape {shape}: must be" in str(caught.value)
    assert allowed in str(caught.value)


# The packaged backbone of texts; all but the refusal needs the packages of the extra ``features-text``.


INSTALLED = all(importlib.util.find_spec(name) for name in ("wordllama", "tokenizers"))
needs_packages = pytest.mark.skipif(not INSTALLED, reason="the extra features-text is not installed")


@needs_packages
def test_features_are_the_mean_of_the_vectors_of_all_tokens_and_no_special_one() -> None:
    ids = wordllama.tokens(["Hello world", "Hello"])
    assert ids.shape == (2, 1, 1, 512)
    assert ids[:, 0, 0, :3].tolist() == [[15043, 3186, 0], [15043, 0, 0]]
    backbone = backbone_of("wordllama")
    vectors = load_file(wordllama._file(wordllama.VECTORS))["embedding.weight"].float()
    expected = torch.stack([(vectors[15043] + vectors[3186]) / 2, vectors[15043]])
    torch.testing.assert_close(backbone.build()(ids), expected, rtol=0, atol=1e-6)
    assert "wordllama" not in sys.modules


@pytest.mark.parametrize("missing", [("wordllama",), ("tokenizers",), ("wordllama", "tokenizers")])
def test_a_missing_package_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    found = importlib.util.find_spec
    spec = found("torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else spec)
    with pytest.raises(
        OptionError, match=f"but {' and '.join(missing)} is not installed: pip install '.*features-text"
    ):
        wordllama.tokenizer_digest()


# The shim is tried on a stand-in torchvision in a fresh process, for each way in which the import can end.


ROOT = Path(__file__).parents[3]
# As torchvision behaves without its compiled operators: the first missing one fails its import, then the second.
BROKEN = """
import torch
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        raise RuntimeError(f"operator torchvision::{name} does not exist")
"""
REPORT = """
import torch
from strategies.core.vision import torchvision
print(torchvision.__name__, [hasattr(torch.ops.torchvision, name) for name in ("nms", "qnms")])
"""


def imported_with(stand_in: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import the shim in a new process where torchvision is the given text."""
    (folder / "torchvision.py").write_text(stand_in)
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n"
    return subprocess.run([sys.executable, "-c", path + REPORT], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="only a CPU build of torch is mended")
def test_import_without_compiled_operators_declares_both(tmp_path: Path) -> None:
    ended = imported_with(BROKEN, tmp_path)
    assert ended.stdout.split(maxsplit=1) == ["torchvision", "[True, True]\n"], ended.stderr
