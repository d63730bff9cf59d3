"""Views of images: changes of colour against torchvision's, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from client_app import views
from client_app.views import brighter, contrasted, grey, hued, jittered, saturated, view
from fl_app.vision import torchvision

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def images(count: int = 6, channels: int = 3) -> torch.Tensor:
    return torch.rand(count, channels, 12, 12, generator=torch.Generator().manual_seed(2))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("change", "name", "amounts"),
    [
        (brighter, "adjust_brightness", [0.6, 0.9, 1.0, 1.1, 1.25, 1.4]),
        (contrasted, "adjust_contrast", [0.6, 0.9, 1.0, 1.1, 1.25, 1.4]),
        (saturated, "adjust_saturation", [0.6, 0.9, 1.0, 1.1, 1.25, 1.4]),
        (hued, "adjust_hue", [-0.1, -0.05, 0.0, 0.01, 0.05, 0.1]),
    ],
)
def test_change_of_colour_equals_torchvision_s_image_by_image(change: Change, name: str, amounts: list[float]) -> None:
    batch = images()
    batch[0, :, :2] = 0.5  # without colour
    batch[1, 0] = batch[1, 1]

    found = change(batch, torch.tensor(amounts).view(-1, 1, 1, 1))

    known = getattr(torchvision.transforms.functional, name)
    expected = torch.stack([known(image, amount) for image, amount in zip(batch, amounts, strict=True)])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_grey_equals_torchvision_s() -> None:
    expected = torchvision.transforms.functional.rgb_to_grayscale(images())

    torch.testing.assert_close(grey(images()), expected, rtol=0, atol=1e-5)
    assert grey(images(channels=1)).equal(images(channels=1))


def test_images_of_one_channel_change_in_brightness_and_contrast_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("saturated", "hued"):
        monkeypatch.setattr(views, name, lambda *_: pytest.fail("a change of colour"))

    assert not torch.equal(jittered(images(channels=1), 6, rng()), images(channels=1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("each", [True, False])
def test_view_keeps_shape_range_and_input_and_is_another_at_each_draw(channels: int, each: bool) -> None:
    batch, kept, source = images(channels=channels), images(channels=channels), rng()

    first, second = (view(batch, source, flips=True, each=each) for _ in range(2))

    assert torch.equal(batch, kept)
    assert first.shape == batch.shape
    assert 0 <= float(first.min()) <= float(first.max()) <= 1
    assert not torch.equal(first, second)
    assert torch.equal(first, view(batch, rng(), flips=True, each=each))


@pytest.mark.parametrize(("each", "alike"), [(False, True), (True, False)])
def test_one_draw_for_a_batch_changes_equal_images_alike(each: bool, alike: bool) -> None:
    batch = images(1).expand(5, -1, -1, -1)

    found = view(batch, rng(), flips=True, each=each)

    assert all(torch.allclose(one, found[0]) for one in found) == alike


def test_grey_and_flip_have_their_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "enlarged", lambda pixels, *_, draws: pixels)
    monkeypatch.setattr(views, "JITTERED", 0.0)
    one = images(1)
    found = view(one.expand(2000, -1, -1, -1), rng(), flips=True)

    colourless = (found.amax(1) - found.amin(1)).amax((1, 2)) < 1e-6
    mirrored = (grey(found) - grey(one.flip(3))).abs().amax((1, 2, 3)) < 1e-3
    assert 0.15 < colourless.float().mean() < 0.25  # of 2,000 draws the deviation is 0.009
    assert 0.45 < mirrored.float().mean() < 0.55
    straight = view(one.expand(50, -1, -1, -1), rng(), flips=False)
    assert bool(((grey(straight) - grey(one)).abs() < 1e-3).all())
