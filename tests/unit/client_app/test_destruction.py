"""Each way in which FedOV's clients destroy an image, and their chances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from client_app import destruction
from client_app.destruction import DESTRUCTIONS, blur, cut, destroy, erase, resized_crop, rotate_part

BLACK = torch.full((3, 1, 1), -1.0)
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


@pytest.mark.parametrize("function", [destroy, *KINDS])
def test_another_seed_changes_images_otherwise(function: Callable[..., torch.Tensor]) -> None:
    assert not torch.equal(changed_by(function, images(), 0), changed_by(function, images(), 1))


@pytest.mark.parametrize("side", [4, 5, 7, 8])
@pytest.mark.parametrize("function", [destroy, *KINDS])
def test_small_and_odd_images_keep_their_shape(function: Callable[..., torch.Tensor], side: int) -> None:
    changed = changed_by(function, images(30, side=side))

    assert changed.shape == (30, 3, side, side)
    assert bool(changed.isfinite().all())


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


def test_a_blur_of_one_bright_pixel_is_nearly_a_box_of_a_long_and_a_short_side() -> None:
    dark = torch.zeros(400, 1, 16, 16)
    dark[:, 0, 8, 8] = 1.0

    found: Counter[tuple[int, int]] = Counter()
    for image in changed_by(blur, dark)[:, 0].numpy():
        rows, columns = (np.flatnonzero(image.any(axis)) for axis in (1, 0))
        high, wide = len(rows), len(columns)
        found[high, wide] += 1
        assert rows.mean() == columns.mean() == 8  # about the pixel
        assert image.sum() == pytest.approx(1, rel=1e-5)
        inside = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        # A Gaussian of at least 10 pixels falls by 8 % within 4 pixels of its middle.
        assert inside.min() > 0.9 * inside.max() > 0

    long, short = (3, 5, 7, 9), (1, 3, 5)
    assert set(found) == {(a, b) for a in long for b in short} | {(b, a) for a in long for b in short}


def test_an_erased_rectangle_is_black_and_has_a_third_to_a_half_of_the_area() -> None:
    erased = erase(torch.ones(600, 3, 32, 32), random_generator(), BLACK)
    masks = (erased == -1).all(1)

    assert bool((erased[~masks[:, None].expand_as(erased)] == 1).all())
    share = masks.float().mean((1, 2))
    assert 0.29 < float(share.min()) < 0.36
    assert 0.47 < float(share.max()) < 0.54
    ratios = []
    for mask in masks:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        inside = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert bool(inside.all())
        ratios.append(inside.shape[1] / inside.shape[0])
    # Up to 0.33 : 1 the narrowest strips fit.
    assert 0.3 < min(ratios) < 0.45
    assert 2.2 < max(ratios) < 3.4


def test_a_cut_copies_columns_or_rows_or_swaps_halves_a_third_each() -> None:
    given, half = images(900, 1, 12), 6
    found: Counter[str] = Counter()
    for before, after in zip(given, changed_by(cut, given), strict=True):
        kinds = {
            "columns": copy_within(before, after, half),
            "rows": copy_within(before.transpose(1, 2), after.transpose(1, 2), half),
            "across": torch.equal(after.roll(half, 2), before),
            "down": torch.equal(after.roll(half, 1), before),
        }
        (kind,) = (name for name, holds in kinds.items() if holds)
        found[kind] += 1
    share = {name: count / 900 for name, count in found.items()}
    wanted = {"columns": 1 / 3, "rows": 1 / 3, "across": 1 / 6, "down": 1 / 6}
    assert share == pytest.approx(wanted, abs=0.05)


def copy_within(before: torch.Tensor, after: torch.Tensor, half: int) -> bool:
    """Whether columns [q, q + h) were copied over [p, p + h), with p and q below h and at least h / 2 apart."""
    for p in range(half):
        for q in range(half):
            expected = before.clone()
            expected[..., p : p + half] = before[..., q : q + half]
            if 2 * abs(p - q) >= half and torch.equal(after, expected):
                return True
    return False


@pytest.mark.parametrize("side", [8, 9])
def test_a_swap_and_a_turn_keep_every_pixel(side: int) -> None:
    given = images(60, side=side)

    turned, cuts = changed_by(rotate_part, given), changed_by(cut, given)

    assert torch.equal(turned.flatten(2).sort(2).values, given.flatten(2).sort(2).values)
    kept = (cuts.flatten(2).sort(2).values == given.flatten(2).sort(2).values).all(2).all(1)
    assert 0 < int(kept.sum()) < 60  # swaps, and copies beside them


def test_two_squares_of_half_the_rows_are_turned_by_the_same_quarters_and_the_rest_stays() -> None:
    given, half = images(300, 2, 12), 6
    found = set()
    for before, after in zip(given, changed_by(rotate_part, given), strict=True):
        (kind,) = (
            (place, turns)
            for place in range(half)
            for turns in (1, 2, 3)
            if torch.equal(after, turned(before, place, half, turns))
        )
        found.add(kind)
    assert found == {(place, turns) for place in range(half) for turns in (1, 2, 3)}


def turned(image: torch.Tensor, place: int, half: int, turns: int) -> torch.Tensor:
    result = image.numpy().copy()
    for left in (0, half):
        square = image.numpy()[:, place : place + half, left : left + half]
        result[:, place : place + half, left : left + half] = np.rot90(square, turns, (1, 2))
    return torch.from_numpy(result)


def test_every_kind_is_drawn_and_cutting_and_turning_twice_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(number: int) -> Callable[..., torch.Tensor]:
        return lambda batch, *_: torch.full_like(batch, number)

    marks = {function: mark(number) for number, function in enumerate(KINDS)}
    monkeypatch.setattr(destruction, "DESTRUCTIONS", tuple(marks[function] for function in DESTRUCTIONS))

    drawn = changed_by(destroy, images(7000, 1, 4))

    assert bool((drawn == drawn[:, :, :1, :1]).all())
    share = torch.bincount(drawn[:, 0, 0, 0].long(), minlength=5) / 1000
    assert (resized_crop, blur, erase, cut, rotate_part) == KINDS
    torch.testing.assert_close(share, torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0]), rtol=0, atol=0.12)
