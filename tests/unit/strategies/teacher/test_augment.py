import torch

from strategies.core.seeds import generator as rng
from strategies.teacher.augment import crop_flip

IMAGES = torch.rand(64, 2, 6, 5, generator=rng(0)) + 0.1


def test_crop_flip_of_each_image_is_some_shift_of_it_padded_with_black() -> None:
    pad = 2
    cropped = crop_flip(IMAGES, rng(1), pad=pad)
    padded = torch.nn.functional.pad(IMAGES, [pad] * 4)
    places = []
    for result, source in zip(cropped, padded, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            for mirrored in (False, True)
            if torch.equal(result.flip(2) if mirrored else result, source[:, top : top + 6, left : left + 5])
        ]
        assert len(found) == 1
        places.append(found[0])
    assert {top for top, _, _ in places} == set(range(5))
    assert {left for _, left, _ in places} == set(range(5))
    assert 16 <= sum(mirrored for _, _, mirrored in places) <= 48
