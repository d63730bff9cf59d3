from collections.abc import Sequence
from typing import Any

import pytest
import torch
from method_fakes import Book
from torch import Tensor, nn

from strategies.core.errors import UploadError
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator as rng
from strategies.core.seeds import seeded_torch
from strategies.distillation.generator_spec import GeneratorSpec
from strategies.distillation.generators import (
    DenseGenerator,
    FeatureGenerator,
    PixelConv,
)
from strategies.distillation.matched import draw_labels, shares_of
from strategies.method import Job, Normalization, Upload


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixel_conv_equals_the_convolution_with_its_weights_forward_and_backward(
    channels: int, channels_last: bool
) -> None:
    fast = PixelConv(5, channels).double()
    x = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    results = []
    for call in (fast, lambda x: nn.functional.conv2d(x, fast.weight, fast.bias, padding=1)):
        inputs = x.clone().requires_grad_()
        made = call(inputs)
        gradients = torch.autograd.grad(made.square().sum(), [inputs, fast.weight, fast.bias])
        results.append([made, *gradients])
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("wide_generators")
def test_reset_follows_the_law_and_depends_on_the_generator_only() -> None:
    model = DenseGenerator(256, (1, 16, 16))
    model(torch.randn(4, 256, generator=rng(0)))
    model.reset(rng(7))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name.endswith("bias"):
            assert not value.any(), name
        else:
            centre = 1.0 if "norm" in name else 0.0
            assert float(value.mean()) == pytest.approx(centre, abs=0.01), name
            assert float(value.std()) == pytest.approx(0.02, rel=0.3), name
    assert not model.norm0.running_mean.any()  # type: ignore[union-attr]
    model(torch.randn(4, 256, generator=rng(0)))
    model.reset(rng(7))
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    model.reset(rng(8))
    assert not torch.equal(model.project.weight, first["project.weight"])


# Generators of noise and labels.


LABELS = torch.tensor([0, 3, 1, 1, 2, 0])


def test_features_are_those_of_the_table() -> None:
    with seeded_torch(0):
        model = FeatureGenerator(5, 4, 7, 6)
    noise = torch.randn(6, 5, generator=rng(0))
    one_hot = nn.functional.one_hot(LABELS, 4).float()

    def normalised(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()

    first = normalised(torch.cat([noise @ model.project.weight.T, one_hot @ model.project_label.weight.T], dim=1))
    second = nn.functional.leaky_relu(normalised(first @ model.hidden.weight.T), 0.2)
    torch.testing.assert_close(model(noise, LABELS), second @ model.features.weight.T + model.features.bias)


# The description of a generator that comes with a request.


SPEC = GeneratorSpec("features", "normal", 5, 4, 8, (1, 8, 12), 6, 9.8, 20)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("level", "pixels", "one of features, images"),
        ("noise", 1, "one of normal, uniform"),
        ("latent", 0, "a whole number from 1 to 65536"),
        ("classes", 4.0, "a whole number"),
        ("width", 10**9, "a whole number"),
        ("image-channels", True, "a whole number"),
        ("image-height", "8", "a whole number"),
        ("image-width", -8, "a whole number"),
        ("batch", None, "a whole number"),
        ("epochs", 0, "a whole number"),
        ("weight", float("nan"), "a finite number at least 0"),
        ("weight", -1.0, "a finite number"),
        ("weight", float("inf"), "a finite number"),
        ("weight", True, "a finite number"),
        ("weight", "1", "a finite number"),
    ],
)
def test_wrong_descriptions_are_refused(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(UploadError, match=f"the server's generator-{key} is .*: must be {allowed}"):
        GeneratorSpec.read({**SPEC.as_config(), f"generator-{key}": value})


# Labels as often as clients hold them, and what each client counts for them.


def job(*counts: Sequence[int] | None, classes: int = 4) -> Job:
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", "net", label_counts=None if own is None else tuple(own)), dict)
        for k, own in enumerate(counts)
    )
    return Job(uploads, {}, "net", classes, (1, 8, 8), Normalization((0.5,), (0.5,)), None)


def test_fixed_labels_are_the_floors_of_the_cumulated_shares() -> None:
    # p = (1/2, 0, 1/6, 1/3); cumulated times 10: 5, 5, 6.67, 10; floors 5, 5, 6, 10.
    labels = draw_labels([3, 0, 1, 2], 10, "fixed", rng(0))
    assert labels.bincount(minlength=4).tolist() == [5, 0, 1, 4]


def test_independent_labels_follow_the_shares_and_not_their_floors() -> None:
    labels = draw_labels([3, 0, 1, 2, 0], 60_000, "independent", rng(0))
    counts = labels.bincount(minlength=5)
    assert counts.tolist() != [30_000, 0, 10_000, 20_000, 0]
    torch.testing.assert_close(counts / 60_000, torch.tensor([3.0, 0, 1, 2, 0]) / 6, rtol=0, atol=0.01)
    assert counts[[1, 4]].tolist() == [0, 0]


def test_missing_counts_weigh_all_equally_and_are_noted_once() -> None:
    notes = Book()
    held, alpha = shares_of(job((6, 0, 1, 0), None, None), notes, labels="counts", weights="per-class")
    assert held == [1] * 4
    torch.testing.assert_close(alpha, torch.full((3, 4), 1 / 3))
    assert notes.rows == [{"note": "no label counts from c1, c2: all classes and clients weigh the same"}]


@pytest.mark.parametrize("told", [(None, None), ((6, 0, 1, 0), None), ((6, 0, 1, 0), (0, 0, 0, 0))])
def test_estimates_count_where_a_client_does_not_tell(told: Any) -> None:
    notes, found = Book(), torch.tensor([[6.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.25, 0.0]])
    held, alpha = shares_of(job(*told), notes, labels="counts", weights="per-class", found=found)
    assert held == [6000, 500, 1250, 0]
    torch.testing.assert_close(alpha[:, :3], torch.tensor([[1.0, 0.0, 0.8], [0.0, 1.0, 0.2]]))
    assert notes.rows == []
