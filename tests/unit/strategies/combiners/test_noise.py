"""Random fields and the images made of them; their spectrum is measured with numpy's Fourier transform."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.combiners import noise
from strategies.combiners.noise import noise_images, overlaid, random_fields
from strategies.core.seeds import generator

SHAPES = [(1, 16, 16), (3, 8, 12), (3, 7, 5), (1, 1, 9), (2, 9, 1), (1, 2, 2)]


def images(count: int = 40, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0) -> Tensor:
    return noise_images(count, shape, generator(seed, "test"))


def distinct(found: Tensor) -> int:
    return len({image.numpy().tobytes() for image in found})


@pytest.fixture
def inputs_of_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the tanh out, so that an image is ``(1 + gain (field + offset)) / 2``."""
    monkeypatch.setattr(torch, "tanh", lambda values: values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_any_shape_are_pixels_that_differ(shape: tuple[int, int, int]) -> None:
    found = images(30, shape)
    assert found.shape == (30, *shape)
    assert found.dtype == torch.float32
    assert bool(found.isfinite().all())
    assert 0 <= float(found.min()) < 0.3
    assert 0.7 < float(found.max()) <= 1
    assert distinct(found) == 30
    assert float(found.flatten(1).std(1).min()) > 0


def test_images_of_the_same_generator_have_the_same_bits_and_of_another_seed_others() -> None:
    assert torch.equal(images(), images())
    assert not torch.equal(images(), images(seed=1))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    images()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 6, 7, 12, 13])
def test_images_come_in_parts_of_a_bounded_size_and_all_of_them(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = random_fields

    def counted(count: int, *rest: object) -> Tensor:
        sizes.append(count)
        return make(count, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(noise, "AT_ONCE", 6)
    monkeypatch.setattr(noise, "random_fields", counted)
    found = images(count)
    assert found.shape == (count, 1, 8, 8)
    assert sizes == [6] * (count // 6) + [count % 6] * (count % 6 > 0)
    assert distinct(found) == count


@pytest.mark.parametrize(
    ("shape", "most"),
    [((1, 8, 8), 6), ((3, 8, 8), 6), ((3, 9, 8), 5), ((3, 16, 16), 1), ((3, 40, 40), 1)],
    ids=str,
)
def test_large_images_come_in_smaller_parts(
    shape: tuple[int, int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "AT_ONCE", 6)
    monkeypatch.setattr(noise, "VALUES_AT_ONCE", 6 * 3 * 8 * 8)
    sizes = [len(batch) for batch in noise.noise_batches(13, shape, generator(0, "test"))]
    assert sum(sizes) == 13
    assert set(sizes[:-1]) == {most}


def test_images_of_the_usual_shapes_come_a_thousand_at_once() -> None:
    """Their bits depend on it."""
    shapes = ((1, 16, 16), (1, 32, 32), (3, 32, 32))
    firsts = [next(noise.noise_batches(2000, shape, generator(0, "test"))) for shape in shapes]
    assert [len(first) for first in firsts] == [1024] * 3


@pytest.mark.parametrize("size", [(8, 8), (5, 12), (1, 9), (9, 1), (1, 2)], ids=str)
def test_fields_have_mean_zero_and_variance_one_each(size: tuple[int, int]) -> None:
    fields = random_fields(50, 3, torch.linspace(0.5, 3, 50), size, generator(0, "test")).double()
    assert fields.shape == (50, 3, *size)
    torch.testing.assert_close(fields.mean((2, 3)), torch.zeros(50, 3, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(fields.square().mean((2, 3)), torch.ones(50, 3, dtype=torch.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("exponent", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("size", [(16, 16), (12, 20), (1, 64)], ids=str)
def test_amplitude_of_fields_falls_with_the_frequency_as_its_exponent_says(
    size: tuple[int, int], exponent: float
) -> None:
    fields = random_fields(800, 1, torch.full((800,), exponent), size, generator(0, "test")).double().numpy()
    power = (np.abs(np.fft.fft2(fields[:, 0])) ** 2).mean(0)
    frequency = np.hypot(np.fft.fftfreq(size[0])[:, None], np.fft.fftfreq(size[1])[None, :])
    held = frequency > 4 / max(size)  # each image's variance of 1 is mostly that of the few lowest
    slope, _ = np.polyfit(np.log(frequency[held]), np.log(power[held]) / 2, 1)
    assert power[0, 0] < 1e-3 * power[held].min()
    assert slope == pytest.approx(-exponent, abs=0.05)


def test_fields_of_an_image_have_their_own_exponent() -> None:
    rough, smooth = random_fields(2, 1, torch.tensor([0.5, 3.0]), (32, 32), generator(0, "test"))[:, 0].double()

    def steps(field: Tensor) -> float:
        return float((field[1:] - field[:-1]).square().mean())

    assert steps(rough) > 20 * steps(smooth)


def test_fields_are_gaussian_and_channels_independent() -> None:
    fields = random_fields(400, 2, torch.full((400,), 0.5), (16, 16), generator(0, "test")).double()
    assert float((fields**4).mean()) == pytest.approx(3, abs=0.1)
    assert float((fields**3).mean()) == pytest.approx(0, abs=0.05)
    agreement = (fields[:, 0] * fields[:, 1]).mean((1, 2))
    assert float(agreement.mean()) == pytest.approx(0, abs=0.02)


@pytest.mark.usefixtures("inputs_of_tanh")
def test_grey_images_have_gains_and_offsets_of_their_own() -> None:
    inputs = 2 * images(3000).double() - 1
    gain = inputs.std((1, 2, 3), correction=0)
    offset = inputs.mean((1, 2, 3)) / gain
    assert (float(gain.log().mean()), float(gain.log().std())) == pytest.approx((0.5, 0.7), abs=0.05)
    assert (float(offset.mean()), float(offset.std())) == pytest.approx((0.0, 1.0), abs=0.05)


@pytest.mark.usefixtures("inputs_of_tanh")
def test_colour_images_have_a_gain_each_and_a_tint_per_channel() -> None:
    inputs = 2 * images(3000, (3, 8, 8)).double() - 1
    # The variance of a channel is that of its field, 1 in the mean over images, times (0.6 gain)^2.
    scale = inputs.var((2, 3), correction=0).mean(1).sqrt() / 0.6
    assert (float(scale.log().mean()), float(scale.log().std())) == pytest.approx((0.0, 0.6), abs=0.06)
    colours = inputs.mean((2, 3)) / scale[:, None]
    assert float(colours.var()) == pytest.approx(0.5**2 + 0.3**2, rel=0.1)
    assert float((colours[:, 0] - colours[:, 1]).var()) == pytest.approx(2 * 0.3**2, rel=0.1)


def test_channels_of_a_colour_image_agree_by_a_share_of_its_own() -> None:
    inputs = images(2000, (3, 8, 8)).double()
    centred = inputs - inputs.mean((2, 3), keepdim=True)
    first, second = (part / part.square().mean((1, 2), keepdim=True).sqrt() for part in (centred[:, 0], centred[:, 1]))
    agreement = (first * second).mean((1, 2))
    assert float(agreement.mean()) == pytest.approx(0.5, abs=0.05)  # the share that is common is uniform in [0, 1]
    assert float((agreement > 0.9).double().mean()) > 0.05
    assert float((agreement < 0.2).double().mean()) > 0.05


def test_exponents_cover_the_range_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    make = random_fields

    def watched(count: int, channels: int, exponent: Tensor, *rest: object) -> Tensor:
        drawn.append(exponent)
        return make(count, channels, exponent, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(noise, "random_fields", watched)
    images(1000, (3, 4, 4))
    common, own = drawn
    low, high = noise.EXPONENTS
    assert torch.equal(common, own)
    assert low <= float(common.min()) < low + 0.05
    assert high - 0.05 < float(common.max()) <= high
    assert float(common.mean()) == pytest.approx((low + high) / 2, abs=0.1)
    assert float(common.std()) == pytest.approx((high - low) / math.sqrt(12), rel=0.05)


def test_shapes_show_another_image_of_the_batch_or_one_colour_and_images_stay() -> None:
    """Every image has a colour of its own, so that what a pixel shows tells where it comes from."""
    colours = torch.arange(200.0)[:, None, None, None].expand(200, 3, 16, 16) / 1000
    kept = colours.clone()
    found = overlaid(colours, 1, generator(0, "test"))
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


def test_no_layers_are_the_images_and_each_more_covers_more() -> None:
    bare = images(100, (1, 16, 16))
    assert torch.equal(overlaid(bare, 0, generator(0, "test")), bare)
    changed = [float((overlaid(bare, layers, generator(0, "test")) != bare).double().mean()) for layers in (1, 3, 6)]
    assert changed == sorted(changed)
    assert changed[0] > 0.05
    assert changed[2] > 2 * changed[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_overlaid_images_of_any_shape_are_pixels_and_repeat_by_their_generator(shape: tuple[int, int, int]) -> None:
    bare = images(30, shape)
    found = overlaid(bare, 3, generator(1, "test"))
    assert found.shape == bare.shape
    assert 0 <= float(found.min()) <= float(found.max()) <= 1
    assert torch.equal(found, overlaid(bare, 3, generator(1, "test")))
    assert not torch.equal(found, overlaid(bare, 3, generator(2, "test")))
