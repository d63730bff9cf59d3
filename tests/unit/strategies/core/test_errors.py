"""The line that a user gets, and what it shows of a text from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strategies.core.bounds import MOST, shorten_changes, shorten_step
from strategies.core.durable import read_json, verify_digest, with_digest, write_facts
from strategies.core.errors import OneShotError, StoreError, UploadError, printable
from strategies.core.fingerprint import (
    SIZE,
    check_fingerprint,
    decode_fingerprint,
    describe_difference,
    encode_fingerprint,
    short_fingerprint,
)


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(StoreError("file:\n damaged\t(bytes)")) == "file: damaged (bytes)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[31mall is well\x1b[0m", r"\x1b[2J\x1b[31mall is well\x1b[0m"),
        ("\x9b31m", r"\x9b31m"),
        ("fine\rrefused", "fine refused"),
        ("a\nb\x00c\x07", r"a b\x00c\x07"),
        ("\u202egnirts", r"\u202egnirts"),
        ("\ud800", r"\ud800"),
        ("Größe 3 µm, 模型", "Größe 3 µm, 模型"),
    ],
)
def test_control_characters_of_a_client_are_written_out(text: str, shown: str) -> None:
    assert str(OneShotError(text)) == shown
    assert str(UploadError(text, "alice")) == f"alice: {shown}"
    assert UploadError(text, "alice").reason == shown  # which logs and the table of refusals show
    assert printable(shown) == shown


# The fields of a feature function as they travel, the difference of two, and the probe.


FIELDS = {"backbone": "tiny 1.0", "mean": [0.5, 0.25], "dim": 0}


def raw(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data.ljust(SIZE, b"\0")), dtype=torch.uint8)


def test_fields_are_read_as_they_were_packed() -> None:
    assert encode_fingerprint(FIELDS).shape == (SIZE,)
    assert decode_fingerprint(encode_fingerprint(FIELDS)) == FIELDS
    assert short_fingerprint(encode_fingerprint(FIELDS)) != short_fingerprint(encode_fingerprint({**FIELDS, "dim": 1}))
    assert len(short_fingerprint(encode_fingerprint(FIELDS))) == 8


def test_a_difference_has_the_first_fields_with_both_values() -> None:
    other = encode_fingerprint({**FIELDS, "mean": [0.5, 0.3], "dim": 8, "dim-seed": 3, "map": "relu"})
    assert describe_difference(encode_fingerprint(FIELDS), other) == (
        "mean: (0.5, 0.25), expected is (0.5, 0.3); dim: 0, expected is 8; dim-seed: nothing, expected is 3; 1 more"
    )


@pytest.mark.parametrize("data", [b"", b"[" * SIZE, b"\xff\x00{", b"[1, 2]", b'{"backbone": "' + b"y" * 900 + b'"}'])
def test_bytes_from_outside_are_told_in_a_short_line(data: bytes) -> None:
    text = describe_difference(raw(data), encode_fingerprint(FIELDS))
    assert "backbone: " in text
    assert "expected is tiny 1.0" in text
    assert len(text) < 400


def test_a_backbone_of_another_build_of_its_package_is_the_same_and_of_another_release_is_not() -> None:
    own, built, newer = (
        encode_fingerprint({**FIELDS, "backbone": f"net (torchvision {of})"}) for of in ("1.0", "1.0+cu130", "1.1")
    )
    check_fingerprint(built, own)
    check_fingerprint(own, built)
    for told, expected in ((newer, own), (newer, built), (raw(b""), own)):
        with pytest.raises(UploadError, match="its features come from another function"):
            check_fingerprint(told, expected)


# The bound on a client's change of the parameters, against medians by hand.


START = {"a": np.array([1.0, 2.0], np.float32), "b": np.array([[3.0]], np.float32)}


def moved(length: float) -> dict[str, np.ndarray]:
    """Return parameters at a distance from the start, along (0.6, 0, 0.8)."""
    return {"a": START["a"] + np.array([0.6, 0.0], np.float32) * length, "b": START["b"] + np.float32(0.8 * length)}


def distance(end: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(end[name] - value).sum() for name, value in START.items())))


@pytest.mark.parametrize("length", [1e2, 1e4, 9e8])
def test_a_longer_change_keeps_its_direction_and_ends_at_the_bound(length: float) -> None:
    found, ratios = shorten_changes(START, [moved(1.0), moved(length), moved(2.0), moved(1.5)])

    assert distance(found[1]) == pytest.approx(1.5 * MOST, rel=1e-3)
    assert found[1]["a"][1] == START["a"][1]
    assert found[1]["a"].dtype == np.float32
    assert ratios[1] == pytest.approx(length / 1.5, rel=1e-3)


@pytest.mark.parametrize("ends", [[], [moved(1e6)], [moved(1.0), moved(1e6)], [moved(0.0), moved(0.0), moved(1e6)]])
def test_two_changes_and_a_median_of_zero_bound_nothing(ends: list[dict[str, np.ndarray]]) -> None:
    found, ratios = shorten_changes(START, ends)

    assert [distance(one) for one in found] == [distance(one) for one in ends]
    assert set(ratios) <= {0.0}


def along(length: float) -> dict[str, np.ndarray]:
    """Return a step of a length, along (0.6, 0, 0.8)."""
    return {"a": np.array([0.6 * length, 0.0]), "b": np.array([[0.8 * length]])}


@pytest.mark.parametrize("length", [1e2, 1e30, 1e99])  # float32 ends at 3.4e38
def test_a_longer_step_of_the_server_is_as_long_as_the_bound_says(length: float) -> None:
    found = shorten_step(START, along(length), [moved(1.0), moved(1.5), moved(2.0)], 2.0)
    assert (found["a"], found["b"]) == (pytest.approx([1.8, 0.0]), pytest.approx(np.array([[2.4]])))


# Facts that carry their own digest.


FACTS: dict[str, Any] = {"a": 1, "b": [0.1, 1e-300, None, True], "ü": {"c": "\ud800", "": []}}


@pytest.mark.parametrize("facts", [FACTS, {}, {"n": 2**200}, {"digest-of": "x"}])
def test_facts_come_back_equal_through_json(facts: dict[str, Any], tmp_path: Path) -> None:
    assert verify_digest(json.loads(json.dumps(with_digest(facts)))) == facts
    write_facts(tmp_path / "a.json", facts)
    assert read_json(tmp_path / "a.json") == facts


def test_a_list_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("[1]")
    assert read_json(tmp_path / "b.json") == [1]


@pytest.mark.parametrize(
    "facts",
    [
        FACTS, {}, with_digest(FACTS) | {"a": 2}, with_digest(FACTS) | {"digest": "0" * 64},
        with_digest(FACTS) | {"z": 1},
        with_digest(FACTS) | {"digest": 3}, with_digest(FACTS) | {"digest": None},
        {**FACTS, "digesu": with_digest(FACTS)["digest"]},
    ],
)  # fmt: skip
def test_facts_that_are_not_those_of_their_digest_are_an_error_that_names_the_file(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(facts))
    with pytest.raises(StoreError, match=r"a\.json: damaged.*its digest differs"):
        read_json(tmp_path / "a.json")


def test_facts_that_json_lacks_are_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    write_facts(tmp_path / "a.json", FACTS)
    for odd in (float("nan"), {1, 2}, b"bytes"):
        with pytest.raises(StoreError, match=r"a\.json: "):
            write_facts(tmp_path / "a.json", {"odd": odd})
    assert read_json(tmp_path / "a.json") == FACTS
