"""Each way in which FedOV's clients destroy an image, and their chances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from client_app.training.fedov import DESTRUCTIONS, blur, destroy, resized_crop

KINDS = tuple(dict.fromkeys(DESTRUCTIONS))


def random_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 40, channels: int = 3, side: int = 12) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=random_generator(1)) + 1


def ramp(count: int, side: int = 16) -> torch.Tensor:
    """Return images whose channels are their own coordinates, x and y in (-1, 1)."""
    line = (2 * torch.arange(side) + 1) / side - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y]).expand(count, -1, -1, -1).clone()


def changed_by(function: Callable[..., torch.Tensor], given: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return function(given, random_generator(seed), torch.full((given.shape[1], 1, 1), -1.0))


@pytest.mark.parametrize("function", [destroy, *KINDS])
def test_an_image_is_changed_and_the_given_one_stays(function: Callable[..., torch.Tensor]) -> None:
    given, copy = images(), images()

    changed = changed_by(function, given)

    assert torch.equal(given, copy)
    assert changed.shape == given.shape
    assert bool(changed.isfinite().all())
    assert bool((changed != given).flatten(1).any(1).all())
    assert torch.equal(changed_by(function, given), changed)


def test_a_crop_is_the_enlargement_of_a_tenth_to_a_third_of_the_area() -> None:
    cropped = changed_by(resized_crop, ramp(200))

    # Coordinates of the visible part: their span, from pixel centre to pixel centre, is 15/16 of the crop's side.
    sides = (cropped.amax((2, 3)) - cropped.amin((2, 3))) * 16 / 15 / 2
    area = sides.prod(1)
    assert 0.08 < float(area.min()) < 0.13  # where the border is repeated a crop spans a little less
    assert 0.28 < float(area.max()) < 0.34
    ratio = sides[:, 0] / sides[:, 1]
    assert 0.7 < float(ratio.min()) < 0.85
    assert 1.2 < float(ratio.max()) < 1.4


def test_a_blur_keeps_the_mean_and_takes_the_detail() -> None:
    blurred = changed_by(blur, images(side=16))

    assert float(blurred.std()) < 0.5 * float(images(side=16).std())
    torch.testing.assert_close(blurred.mean(), images(side=16).mean(), rtol=0.01, atol=0)
