"""Views of images: changes of colour against torchvision's, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from client_app.training.fafi import brighten, change_contrast, grey, rotate_hue, saturate, view
from strategies.core.vision import torchvision

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def images(count: int = 6, channels: int = 3) -> torch.Tensor:
    return torch.rand(count, channels, 12, 12, generator=torch.Generator().manual_seed(2))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("change", "name", "amounts"),
    [
        (brighten, "adjust_brightness", [0.6, 0.9, 1.0, 1.1, 1.25, 1.4]),
        (change_contrast, "adjust_contrast", [0.6, 0.9, 1.0, 1.1, 1.25, 1.4]),
        (saturate, "adjust_saturation", [0.6, 0.9, 1.0, 1.1, 1.25, 1.4]),
        (rotate_hue, "adjust_hue", [-0.1, -0.05, 0.0, 0.01, 0.05, 0.1]),
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


@pytest.mark.parametrize(("each", "alike"), [(False, True), (True, False)])
def test_one_draw_for_a_batch_changes_equal_images_alike(each: bool, alike: bool) -> None:
    batch = images(1).expand(5, -1, -1, -1)

    found = view(batch, rng(), flips=True, each=each)

    assert all(torch.allclose(one, found[0]) for one in found) == alike
