"""Facts that carry their own digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategies.core.durable import read_facts, sealed, unsealed, write_facts
from strategies.core.errors import StoreError

FACTS: dict[str, Any] = {"a": 1, "b": [0.1, 1e-300, None, True], "ü": {"c": "\ud800", "": []}}


@pytest.mark.parametrize("facts", [FACTS, {}, {"n": 2**200}, {"digest-of": "x"}])
def test_facts_come_back_equal_through_json(facts: dict[str, Any], tmp_path: Path) -> None:
    assert unsealed(json.loads(json.dumps(sealed(facts)))) == facts
    write_facts(tmp_path / "a.json", facts)
    assert read_facts(tmp_path / "a.json") == facts


def test_facts_without_a_digest_are_those_of_an_earlier_release(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(FACTS))
    assert read_facts(tmp_path / "a.json") == FACTS
    (tmp_path / "b.json").write_text("[1]")
    assert read_facts(tmp_path / "b.json") == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"a": 2},
        {"digest": "0" * 64},
        {"digest": 3},
        {"digest": None},
        {"z": 1},
    ],
)
def test_changed_facts_are_an_error_that_names_the_file(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**sealed(FACTS), **change}))
    with pytest.raises(StoreError, match=r"a\.json: damaged.*its digest differs"):
        read_facts(tmp_path / "a.json")


def test_digest_under_a_changed_key_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(sealed(FACTS)).replace('"digest"', '"digesu"'))
    with pytest.raises(StoreError, match="its digest differs"):
        read_facts(tmp_path / "a.json")


def test_facts_that_json_lacks_are_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    write_facts(tmp_path / "a.json", FACTS)
    for odd in (float("nan"), {1, 2}, b"bytes"):
        with pytest.raises(StoreError, match=r"a\.json: "):
            write_facts(tmp_path / "a.json", {"odd": odd})
    assert read_facts(tmp_path / "a.json") == FACTS
