"""Random fields and the images made of them; their spectrum is measured with numpy's Fourier transform."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.combiners import noise
from strategies.combiners.noise import generate_noise, noise_batches, overlay_shapes, random_fields, to_feature_space
from strategies.core.facts import Upload, UploadFacts
from strategies.core.seeds import generator
from strategies.method import METHODS, Job, Normalization, Silent

SHAPES = [(1, 16, 16), (3, 8, 12), (3, 7, 5), (1, 1, 9), (2, 9, 1), (1, 2, 2)]


def images(count: int = 40, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0) -> Tensor:
    return torch.cat(list(noise_batches(count, shape, generator(seed, "test"))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_any_shape_are_pixels_that_differ(shape: tuple[int, int, int]) -> None:
    found = images(30, shape)
    assert found.shape == (30, *shape)
    assert found.dtype == torch.float32
    assert bool(found.isfinite().all())
    assert 0 <= float(found.min()) < 0.3
    assert 0.7 < float(found.max()) <= 1
    assert len({image.numpy().tobytes() for image in found}) == 30
    assert float(found.flatten(1).std(1).min()) > 0


@pytest.mark.parametrize("size", [(8, 8), (5, 12), (1, 9), (9, 1), (1, 2)], ids=str)
def test_fields_have_mean_zero_and_variance_one_each(size: tuple[int, int]) -> None:
    fields = random_fields(50, 3, torch.linspace(0.5, 3, 50), size, generator(0, "test")).double()
    assert fields.shape == (50, 3, *size)
    torch.testing.assert_close(fields.mean((2, 3)), torch.zeros(50, 3, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(fields.square().mean((2, 3)), torch.ones(50, 3, dtype=torch.float64), rtol=0, atol=1e-4)


def test_shapes_show_another_image_of_the_batch_or_one_colour_and_images_stay() -> None:
    """Every image has a colour of its own, so that what a pixel shows tells where it comes from."""
    colours = torch.arange(200.0)[:, None, None, None].expand(200, 3, 16, 16) / 1000
    kept = colours.clone()
    found = overlay_shapes(colours, 1, generator(0, "test"))
    assert torch.equal(colours, kept)
    touched = (found != colours).any(1)
    covered = touched.flatten(1).double().mean(1)
    of_another = torch.isin(found, colours).all(1) & touched
    plain = touched & ~of_another
    for image in found:
        assert len({tuple(pixel) for pixel in image.flatten(1).T.tolist()}) <= 2
    assert float((covered > 0).double().mean()) == pytest.approx(noise.COVERED, abs=0.12)
    assert 0.05 < float(covered.max()) < 0.5  # fields are even: above 0.3 lie two fifths of a normal one
    assert not bool((of_another.flatten(1).any(1) & plain.flatten(1).any(1)).any())
    shown = of_another.flatten(1).any(1).double().sum() / touched.flatten(1).any(1).double().sum()
    assert float(shown) == pytest.approx(1 - noise.PLAIN, abs=0.12)


# Tally on heads of one backbone works in the space of features, on noise that the heads' rows span.


WIDTH, CLASSES, HEAD = 24, 3, "head+some"


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(features.flatten(1))
        return logits


class OnImages(Alone):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.normalize(images.flatten(1)[:, :WIDTH] + 2.0, dim=1))

    def on_features(self) -> Alone:
        return Alone()


def upload(client: int, architecture: str = HEAD) -> Upload:
    rng = generator(client, "head")
    weight = 5 * torch.randn(CLASSES, WIDTH, generator=rng)
    state = {"head.weight": weight, "head.bias": torch.randn(CLASSES, generator=rng)}
    counts = tuple(10 * (kind == client % CLASSES) + 1 for kind in range(CLASSES))
    return Upload(UploadFacts(f"client-{client}", architecture, sum(counts), counts), lambda: dict(state))


def job(*uploads: Upload, **given: Any) -> Job:
    config = METHODS["tally"].config(epochs=3, images=256, probes=64)
    basic = {"config": config, "normalization": Normalization((0.5,), (0.5,)), "threads": 1}
    return Job(uploads, {HEAD: OnImages, "net": OnImages}, HEAD, CLASSES, (1, 8, 8), **{**basic, **given})


def test_noise_lies_in_the_span_of_the_centred_rows_and_has_the_size_of_features() -> None:
    found = to_feature_space(job(*map(upload, range(4))))
    (noise,) = generate_noise(found, 300, generator(0, "noise"))
    assert noise.shape == (300, WIDTH, 1, 1)
    torch.testing.assert_close(noise.flatten(1).norm(dim=1), torch.full((300,), math.sqrt(WIDTH)))
    rows = torch.cat([one.read()["head.weight"] - one.read()["head.weight"].mean(0) for one in found.uploads])
    assert int(torch.linalg.matrix_rank(noise.flatten(1))) == int(torch.linalg.matrix_rank(rows)) == 4 * (CLASSES - 1)
    both = torch.cat([rows / rows.norm(), noise.flatten(1)])
    assert int(torch.linalg.matrix_rank(both)) == 4 * (CLASSES - 1)


def test_tally_ends_with_a_head_on_images_and_its_epochs_are_observed_as_such() -> None:
    seen: list[float] = []

    def observer(epoch: int, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, OnImages)
        seen.append(float(model.head.weight.detach().norm()))
        return {"accuracy": 0.0}

    plain = job(*map(upload, range(3)), observer=observer)
    outcome = METHODS["tally"].fit(plain, Silent())
    assert outcome.student["head.weight"].shape == (CLASSES, WIDTH)
    assert seen[-1] == pytest.approx(float(outcome.student["head.weight"].norm()), rel=1e-5)
    assert outcome.images is None
    assert outcome.ensemble.clients == tuple(one.client for one in plain.uploads)
