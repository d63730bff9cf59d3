"""Resizing, normalising and augmenting, against torchvision, Pillow and loops over pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fl_app.data.preprocessing import PADDING, augment, crop_flip, normalize, resize
from strategies.core.vision import torchvision


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def naive_crop_flip(image: torch.Tensor, top: int, left: int, *, flip: bool) -> torch.Tensor:
    channels, height, width = image.shape
    result = torch.zeros_like(image)
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                source_row = row + top - PADDING
                source_column = (width - 1 - column if flip else column) + left - PADDING
                if 0 <= source_row < height and 0 <= source_column < width:
                    result[channel, row, column] = image[channel, source_row, source_column]
    return result


@pytest.mark.parametrize(("channels", "before", "after"), [(1, 28, 32), (3, 32, 20), (1, 8, 16), (3, 64, 32)])
def test_resize_of_8_bit_images_equals_torchvision_on_pillow_images(channels: int, before: int, after: int) -> None:
    images = pixels(5, channels, before, before)
    transform = torchvision.transforms.Resize((after, after))
    expected = []
    for image in images:
        array = image.permute(1, 2, 0).numpy()
        picture = Image.fromarray(array[..., 0] if channels == 1 else array)
        expected.append(torch.from_numpy(np.array(transform(picture)).reshape(after, after, channels)).permute(2, 0, 1))
    difference = resize(images, after).int() - torch.stack(expected).int()
    # The fixed-point weights differ in their last bit.
    assert difference.abs().max() <= 1
    assert difference.bool().float().mean() < 0.05


def test_normalize_equals_torchvision() -> None:
    images, mean, std = pixels(4, 3, 6, 6), (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    expected = torchvision.transforms.functional.normalize(images.float() / 255, mean, std)
    torch.testing.assert_close(normalize(images, mean, std), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_flip_equals_a_loop_over_images(dtype: torch.dtype) -> None:
    images = pixels(6, 2, 7, 5).to(dtype)
    top, left = torch.tensor([0, 8, 4, 1, 7, 4]), torch.tensor([8, 0, 4, 2, 5, 4])
    flip = torch.tensor([True, False, False, True, True, True])
    result = crop_flip(images, top, left, flip=flip)
    assert result.dtype == dtype
    for index, image in enumerate(images):
        expected = naive_crop_flip(image, int(top[index]), int(left[index]), flip=bool(flip[index]))
        assert torch.equal(result[index], expected)


def test_augment_draws_every_crop_and_flip_equally_often() -> None:
    image = pixels(1, 1, 6, 6)
    offsets = 2 * PADDING + 1
    variants = [
        tuple(naive_crop_flip(image[0], top, left, flip=flip).flatten().tolist())
        for top in range(offsets)
        for left in range(offsets)
        for flip in (False, True)
    ]
    draws = 100 * len(variants)
    results = augment(image.expand(draws, -1, -1, -1), "crop-flip", torch.Generator().manual_seed(0))
    seen: dict[tuple[int, ...], int] = {}
    for row in results.flatten(1).tolist():
        seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    assert set(seen) == set(variants)
    # 100 expected of each, standard deviation 10.
    assert min(seen.values()) > 55
    assert max(seen.values()) < 145
