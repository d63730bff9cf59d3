from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategies.core.durable import MIB, verify_digest
from strategies.core.errors import StoreError
from strategies.run.files import write_json
from strategies.run.traffic import Moved, Traffic


def account() -> Traffic:
    traffic = Traffic()
    traffic.add("upload", "bob", up=3 * MIB, down=MIB)
    traffic.add("ensemble", "bob", up=10, down=4 * MIB)
    traffic.add("ensemble", "bob", down=MIB)
    traffic.add("upload", "alice", up=MIB)
    return traffic


def test_bytes_when_added_accumulate_per_phase_and_client() -> None:
    traffic = account()

    assert list(traffic.phases) == ["upload", "ensemble"]
    assert traffic.phases["upload"] == Moved({"bob": 3 * MIB, "alice": MIB}, {"bob": MIB, "alice": 0})
    assert traffic.phases["ensemble"] == Moved({"bob": 10}, {"bob": 5 * MIB})
    assert traffic.up == {"bob": 3 * MIB + 10, "alice": MIB}
    assert traffic.down == {"bob": 6 * MIB, "alice": 0}
    assert traffic.clients == {"alice", "bob"}
    assert traffic.mib_per_client == pytest.approx((10 + 10 / MIB) / 2)
    assert Traffic().mib_per_client == 0.0


def test_an_account_when_saved_is_read_again_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    first = Traffic.read(file)
    first.add("upload", "alice", up=5, down=7)
    first.save()

    second = Traffic.read(file)
    second.add("upload", "alice", up=1)
    second.save()

    assert verify_digest(json.loads(file.read_text())) == {
        "phases": {"upload": {"up": {"alice": 6}, "down": {"alice": 7}}}
    }
    assert Traffic.read(file) == second != first


@pytest.mark.parametrize(
    "held",
    [
        {"phases": {"upload": {"up": {}}}},
        {"phases": {"upload": 3}},
        {"phases": {"upload": {"up": {"a": "x"}, "down": {}}}},
        [1],
    ],
)
def test_a_file_that_is_no_account_is_one_line(tmp_path: Path, held: Any) -> None:
    write_json(tmp_path / "traffic.json", held)

    with pytest.raises(StoreError, match=r"traffic.json is not an account of messages: it lacks bytes per client"):
        Traffic.read(tmp_path / "traffic.json")
