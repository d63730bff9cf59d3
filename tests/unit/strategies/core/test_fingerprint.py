"""The fields of a feature function as they travel, the difference of two, and the probe."""

from __future__ import annotations

import pytest
import torch

from strategies.core.errors import OptionError
from strategies.core.fingerprint import SIZE, difference, packed, probe_warning, short, unpacked

FIELDS = {"backbone": "tiny 1.0", "mean": [0.5, 0.25], "dim": 0}


def raw(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data.ljust(SIZE, b"\0")), dtype=torch.uint8)


def test_fields_are_read_as_they_were_packed() -> None:
    assert packed(FIELDS).shape == (SIZE,)
    assert unpacked(packed(FIELDS)) == FIELDS
    assert short(packed(FIELDS)) != short(packed({**FIELDS, "dim": 1}))
    assert len(short(packed(FIELDS))) == 8


def test_fields_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OptionError, match=r"has 2\d{3} bytes: must be at most 1024"):
        packed({"backbone": "x" * 2000})


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


def test_spaces_alone_are_a_difference_of_form() -> None:
    assert difference(raw(b'{"dim": 0}'), raw(b'{"dim":0}')) == "the form of the fields"


def test_a_probe_differs_from_one_thousandth_on_and_later_in_half_precision() -> None:
    own = torch.randn(16, generator=torch.Generator().manual_seed(0))

    def warning(told: torch.Tensor, expected: torch.Tensor, precision: str = "float32") -> str:
        return probe_warning({"probe": told, "fingerprint": packed({"precision": precision})}, expected)

    assert warning(own * (1 + 5e-4), own) == ""
    assert "differ by 0.002 from the server's" in warning(own * 1.002, own)
    assert "differ by" in warning(own, torch.zeros(16))
    assert "differ by" in warning(own * 1.002, own, "another")
    assert warning(own * 1.01, own, "bfloat16") == ""
    assert "differ by 0.03 from the server's" in warning(own * 1.03, own, "bfloat16")
