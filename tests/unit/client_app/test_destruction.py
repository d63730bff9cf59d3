from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from client_app import destruction
from client_app.destruction import DESTRUCTIONS, blur, copy_half, destroy, erase, resized_crop, rotate_part, swap_halves


def random_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 40, channels: int = 3, side: int = 12) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=random_generator(1)) + 1


def ramp(count: int, side: int = 16) -> torch.Tensor:
    """Return images whose channels are their own coordinates, x and y in (-1, 1)."""
    line = (2 * torch.arange(side) + 1) / side - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y]).expand(count, -1, -1, -1).clone()


@pytest.mark.parametrize("function", [destroy, *DESTRUCTIONS[:-1]])
def test_an_image_is_changed_and_the_given_one_stays(function: Callable[..., torch.Tensor]) -> None:
    given, copy = images(), images()

    changed = function(given, random_generator())

    assert torch.equal(given, copy)
    assert changed.shape == given.shape
    assert bool(changed.isfinite().all())
    assert bool((changed != given).flatten(1).any(1).all())
    assert torch.equal(function(given, random_generator()), changed)


@pytest.mark.parametrize("function", [destroy, resized_crop, erase, copy_half, swap_halves, rotate_part])
def test_another_seed_changes_images_otherwise(function: Callable[..., torch.Tensor]) -> None:
    assert not torch.equal(function(images(), random_generator(0)), function(images(), random_generator(1)))


def test_a_crop_is_the_enlargement_of_a_tenth_to_a_third_of_the_area() -> None:
    cropped = resized_crop(ramp(200), random_generator())

    # Coordinates of the visible part: their span, from pixel centre to pixel centre, is 15/16 of the crop's side.
    sides = (cropped.amax((2, 3)) - cropped.amin((2, 3))) * 16 / 15 / 2
    area = sides.prod(1)
    assert 0.08 < float(area.min()) < 0.13  # where the border is repeated a crop spans a little less
    assert 0.28 < float(area.max()) < 0.34
    ratio = sides[:, 0] / sides[:, 1]
    assert 0.7 < float(ratio.min()) < 0.85
    assert 1.2 < float(ratio.max()) < 1.4


def test_a_blur_keeps_the_mean_and_takes_the_detail() -> None:
    blurred = blur(images(side=16), random_generator())

    assert float(blurred.std()) < 0.25 * float(images(side=16).std())
    torch.testing.assert_close(blurred.mean(), images(side=16).mean(), rtol=0.01, atol=0)


def test_a_blur_of_one_bright_pixel_is_the_gaussian() -> None:
    dark = torch.zeros(1, 1, 16, 16)
    dark[0, 0, 8, 8] = 1.0

    found = blur(dark, random_generator())[0, 0].numpy()

    weights = np.exp(-0.5 * (np.arange(-4, 5) / 2.0) ** 2)
    weights /= weights.sum()
    np.testing.assert_allclose(found[4:13, 4:13], np.outer(weights, weights), atol=1e-7)
    assert found[:3].max() == 0.0


def test_an_erased_rectangle_has_a_third_to_a_half_of_the_area() -> None:
    erased = erase(torch.ones(300, 1, 32, 32), random_generator())[:, 0] == 0

    share = erased.float().mean((1, 2))
    assert 0.29 < float(share.min()) < 0.36
    assert 0.47 < float(share.max()) < 0.54
    for mask in erased[:20]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        assert bool(mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all())


def test_a_copied_half_stands_twice() -> None:
    given = images(60)
    halves = {"left": given[..., :6], "right": given[..., 6:], "upper": given[..., :6, :], "lower": given[..., 6:, :]}
    wanted = {
        name: torch.cat([half, half], dim=-1 if name in ("left", "right") else -2) for name, half in halves.items()
    }

    changed = copy_half(given, random_generator())

    kinds = [[name for name, copy in wanted.items() if torch.equal(image, copy[i])] for i, image in enumerate(changed)]
    assert all(len(found) == 1 for found in kinds)
    assert {name for (name,) in kinds} == set(wanted)


def test_swapped_halves_when_swapped_back_are_the_image() -> None:
    given = images(60)

    changed = swap_halves(given, random_generator())

    across, down = changed.roll(6, -1), changed.roll(6, -2)
    kinds = [(torch.equal(a, g), torch.equal(d, g)) for a, d, g in zip(across, down, given, strict=True)]
    assert set(kinds) == {(True, False), (False, True)}


def test_an_odd_side_loses_no_row() -> None:
    given = images(30, side=7)

    assert copy_half(given, random_generator()).shape == given.shape
    swapped = swap_halves(given, random_generator())
    assert torch.equal(swapped.flatten(1).sort(1).values, given.flatten(1).sort(1).values)


def test_a_part_is_turned_about_its_centre_and_the_rest_stays() -> None:
    given = ramp(100, side=32)

    turned = rotate_part(given, random_generator())

    same = (turned == given).all(1)
    share = 1 - same.float().mean((1, 2))
    assert float(share.min()) > 0.27
    assert float(share.max()) < 0.54
    for before, after, kept in zip(given[:20], turned[:20], same[:20], strict=True):
        old, new = before[:, ~kept], after[:, ~kept]
        near = (old - old.mean(1, keepdim=True)).norm(dim=0) < 0.3  # turned they are within the image still
        here, there = (places[:, near, None] - places[:, None, near] for places in (old, new))
        torch.testing.assert_close(there.norm(dim=0), here.norm(dim=0), rtol=0, atol=1e-4)
        angles = ((here * there).sum(0) / here.norm(dim=0) ** 2)[here.norm(dim=0) > 0].clamp(-1, 1).acos()
        assert float(angles.std()) < 0.01
        assert math.pi / 2 - 0.01 < float(angles.mean()) <= math.pi


def test_every_kind_is_drawn_and_turning_twice_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(number: int) -> Callable[..., torch.Tensor]:
        return lambda batch, _: torch.full_like(batch, number)

    marks = {function: mark(number) for number, function in enumerate(dict.fromkeys(DESTRUCTIONS))}
    monkeypatch.setattr(destruction, "DESTRUCTIONS", tuple(marks[function] for function in DESTRUCTIONS))

    drawn = destroy(images(7000, 1, 4), random_generator())

    assert bool((drawn == drawn[:, :, :1, :1]).all())
    share = torch.bincount(drawn[:, 0, 0, 0].long(), minlength=6) / 1000
    torch.testing.assert_close(share, torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 2.0]), rtol=0, atol=0.12)
