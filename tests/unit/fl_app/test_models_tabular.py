"""Models of rows and of texts: formulas, shapes, what they refuse, and how they go through training and ensembles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_app.data import ImageData
from fl_app.data.text import BUCKETS, LENGTH, tokens
from fl_app.models import build, builders, penultimate
from strategies.combiners.combiners import Mean
from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator, seeded_torch
from strategies.method import Normalization as InputSpace
from strategies.method import Upload
from strategies.teacher.augment import Standardize
from strategies.teacher.ensemble import Ensemble

ROW, TEXT = (13, 1, 1), (1, 1, LENGTH)
SUBJECTS = ("war treaty minister", "goal match team", "shares profit market", "chip software space")


def seeded(name: str, num_classes: int, shape: tuple[int, int, int], seed: int = 0) -> nn.Module:
    with seeded_torch(seed, "init"):
        return build(name, num_classes=num_classes, input_shape=shape)


def rows(count: int) -> ImageData:
    """Examples that one feature tells apart."""
    features = torch.randn(count, *ROW, generator=generator(0, "rows"))
    return ImageData(features, (features[:, 3, 0, 0] > 0).long())


def news(count: int) -> ImageData:
    """Texts with one word of their class among words of none."""
    labels = torch.arange(count) % 4
    words = [SUBJECTS[label].split()[number // 4 % 3] for number, label in enumerate(labels.tolist())]
    return ImageData(tokens([f"today w{number} {word} says" for number, word in enumerate(words)]), labels)


def test_logistic_is_the_binary_cross_entropy_and_its_label_the_sign() -> None:
    model, data = seeded("logistic", 2, ROW), rows(9)
    layer = penultimate(model)
    z = data.images.flatten(1) @ layer.weight[0] + layer.bias
    logits = model(data.images)

    assert torch.equal(logits[:, 0], torch.zeros(9))
    assert torch.allclose(logits[:, 1], z)
    ours = F.cross_entropy(logits, data.labels)
    assert torch.allclose(ours, F.binary_cross_entropy_with_logits(z, data.labels.float()))
    assert torch.equal(logits.argmax(1), (z > 0).long())


@pytest.mark.parametrize(("name", "shape", "layers"), [
    ("logistic", ROW, "fc"), ("mlp", ROW, "fc1 fc2 fc3"), ("text-bag", TEXT, "words.embedding fc1 fc2"),
])  # fmt: skip
def test_state_keys_are_the_pinned_ones(name: str, shape: tuple[int, int, int], layers: str) -> None:
    keys = [f"{layer}.{kind}" for layer in layers.split() for kind in ("weight", "bias")]
    assert list(seeded(name, 2, shape).state_dict()) == [key for key in keys if key != "words.embedding.bias"]


def test_text_bag_is_the_mean_of_the_words_whatever_their_order() -> None:
    model = seeded("text-bag", 4, TEXT).eval()
    texts = tokens(["one two three", "three one two", "one", ""])
    vectors = model.get_submodule("words")(texts)
    table = dict(model.named_parameters())["words.embedding.weight"]

    assert table.shape == (BUCKETS, 64)
    assert torch.allclose(vectors[0], table[texts[0, 0, 0, :3]].mean(0))
    assert torch.allclose(vectors[0], vectors[1])
    assert torch.equal(vectors[2], table[texts[2, 0, 0, 0]])
    assert torch.equal(vectors[3], torch.zeros(64))
    assert model(texts).isfinite().all()


def test_text_bag_passes_over_padding_that_has_noise_as_the_weights_of_a_private_upload_have() -> None:
    model, texts = seeded("text-bag", 4, TEXT).eval(), tokens(["one two three", ""])
    exact = model(texts)

    with torch.no_grad():
        model.get_parameter("words.embedding.weight")[0] += 1.0

    assert torch.equal(model(texts), exact)


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


@pytest.mark.parametrize(("name", "shape"), [("logistic", ROW), ("mlp", ROW), ("text-bag", TEXT)])
@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bfloat16"}, {"form": "stacked"}], ids=["", "bfloat16", "stack"]
)
def test_ensemble_of_uploads_answers_as_its_members(
    name: str, shape: tuple[int, int, int], settings: dict[str, str]
) -> None:
    data = rows(6) if shape == ROW else news(6)
    members = [seeded(name, 2, shape, seed).eval() for seed in range(3)]
    uploads = [Upload(UploadFacts(f"c{k}", name), member.state_dict) for k, member in enumerate(members)]
    inputs = Standardize(InputSpace((0.0,) * shape[0], (1.0,) * shape[0]))(data.images)

    with torch.no_grad():
        found = Ensemble.from_uploads(uploads, builders(2, shape), Mean(), **settings).member_logits(inputs)
        wanted = torch.stack([member(data.images) for member in members])

    assert torch.allclose(found, wanted, atol=0.05 if "precision" in settings else 1e-5)
