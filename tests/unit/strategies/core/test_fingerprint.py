"""The fields of a feature function as they travel, the difference of two, and the probe."""

from __future__ import annotations

import pytest
import torch

from strategies.core.fingerprint import SIZE, difference, packed, short, unpacked

FIELDS = {"backbone": "tiny 1.0", "mean": [0.5, 0.25], "dim": 0}


def raw(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data.ljust(SIZE, b"\0")), dtype=torch.uint8)


def test_fields_are_read_as_they_were_packed() -> None:
    assert packed(FIELDS).shape == (SIZE,)
    assert unpacked(packed(FIELDS)) == FIELDS
    assert short(packed(FIELDS)) != short(packed({**FIELDS, "dim": 1}))
    assert len(short(packed(FIELDS))) == 8


def test_a_difference_has_the_first_fields_with_both_values() -> None:
    other = packed({**FIELDS, "mean": [0.5, 0.3], "dim": 8, "dim-seed": 3, "map": "relu"})
    assert difference(packed(FIELDS), other) == (
        "mean: (0.5, 0.25), expected is (0.5, 0.3); dim: 0, expected is 8; dim-seed: nothing, expected is 3; 1 more"
    )


@pytest.mark.parametrize("data", [b"", b"[" * SIZE, b"\xff\x00{", b"[1, 2]", b'{"backbone": "' + b"y" * 900 + b'"}'])
def test_bytes_from_outside_are_told_in_a_short_line(data: bytes) -> None:
    text = difference(raw(data), packed(FIELDS))
    assert "backbone: " in text
    assert "expected is tiny 1.0" in text
    assert len(text) < 400
