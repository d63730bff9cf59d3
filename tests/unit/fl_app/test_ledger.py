"""The ledger of the privacy that a node has given up over all runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fl_app.ledger import Ledger
from fl_app.node_policy import FREE, NodePolicy
from fl_app.privacy import PrivacyConfig
from strategies.core.errors import StoreError, UploadError

EIGHT = PrivacyConfig(epsilon=8.0)
BUDGET = NodePolicy.of({"max-epsilon": 20.0})


def enter(folder: Path, privacy: PrivacyConfig = EIGHT, policy: NodePolicy = BUDGET, run: str = "a") -> None:
    Ledger.of(folder, "alice").enter(privacy, policy, run=run, server_round=1)


def test_releases_of_all_runs_add_up_and_the_one_beyond_the_budget_is_refused(tmp_path: Path) -> None:
    ledger = Ledger.of(tmp_path, "alice")
    assert ledger.spent() == (0.0, 0.0)

    for run in "ab":
        enter(tmp_path, run=run)

    assert ledger.spent() == (16.0, 2e-5)
    with pytest.raises(
        UploadError, match=r"'privacy.epsilon' is 8: must be at most 4 .* over all runs is 20, of which 16 is"
    ):
        ledger.check(EIGHT, BUDGET)
    with pytest.raises(UploadError, match="must be at most 4"):
        enter(tmp_path, run="c")
    enter(tmp_path, PrivacyConfig(epsilon=4.0), run="c")
    assert ledger.spent()[0] == 20.0
    assert [row["run"] for row in ledger.releases()] == ["a", "b", "c"]
    assert Ledger.of(tmp_path, "bob").spent() == (0.0, 0.0)


def test_delta_adds_up_too(tmp_path: Path) -> None:
    policy = NodePolicy.of({"max-epsilon": 1000.0, "max-delta": 1e-4})
    for run in range(10):
        enter(tmp_path, PrivacyConfig(epsilon=1.0), policy, run=str(run))

    with pytest.raises(UploadError, match=r"'privacy.delta' is 1e-05: must be at most 0 .* whose max-delta"):
        enter(tmp_path, PrivacyConfig(epsilon=1.0), policy)


def test_node_without_a_budget_keeps_the_ledger_and_refuses_nothing(tmp_path: Path) -> None:
    for run in "abc":
        enter(tmp_path, policy=FREE, run=run)
    enter(tmp_path, PrivacyConfig())  # a run without privacy is no entry

    assert Ledger.of(tmp_path, "alice").spent()[0] == 24.0


def test_every_changed_bit_of_a_ledger_is_an_error_or_the_same_sum(tmp_path: Path) -> None:
    enter(tmp_path)
    ledger = Ledger.of(tmp_path, "alice")
    data = ledger.path.read_bytes()

    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        ledger.path.write_bytes(changed)
        try:
            found = ledger.spent()
        except StoreError:
            with pytest.raises(UploadError, match=f"{ledger.path}: damaged"):
                ledger.check(EIGHT, BUDGET)
        else:
            assert found == (8.0, 1e-5)


def test_damaged_ledger_is_never_replaced(tmp_path: Path) -> None:
    enter(tmp_path)
    path = Ledger.of(tmp_path, "alice").path
    path.write_text(json.dumps({"releases": [{"epsilon": -8.0, "delta": 0.0}]}))

    with pytest.raises(UploadError, match="so nothing is sent"):
        enter(tmp_path)
    assert "-8" in path.read_text()


def test_processes_that_enter_at_once_never_exceed_the_budget(tmp_path: Path) -> None:
    refused = []

    def one(run: int) -> None:
        try:
            enter(tmp_path, run=str(run))
        except UploadError as error:
            refused.append(error)

    threads = [threading.Thread(target=one, args=(run,)) for run in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert Ledger.of(tmp_path, "alice").spent()[0] == 16.0
    assert len(refused) == 4
