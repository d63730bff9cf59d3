"""The gatekeeper between the uploads and the server stage of a run, and of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flower_fakes import FakeGrid, answering, named, records, strategy, weights
from flwr.app import RecordDict

from strategies import GatekeeperConfig, OneShot, OneShotFedAvg, RunOptions
from strategies.client import upload_facts
from strategies.core.durable import read_json
from strategies.core.errors import OptionError, QuorumError
from strategies.gatekeeper import inspection
from strategies.run.run_folder import RunFolder
from strategies.run.stage import pinned_clients

QUICK: Mapping[str, Any] = {"images": 1, "steps": 1, "trigger_steps": 0}
COUNTS = [3, 3, 2, 2]


def scaled_upload() -> RecordDict:
    """Return an upload that is far longer than the others'."""
    state = {key: 50.0 * v if v.is_floating_point() else v for key, v in weights(1).items()}
    return records(state, facts=upload_facts(client="alice", label_counts=COUNTS))


def grid() -> Any:
    honest = {k: named(name, k, label_counts=COUNTS) for k, name in enumerate(("bob", "carl", "dora"), start=2)}
    return FakeGrid({1: answering(scaled_upload()), **honest})


def one_shot(run_dir: Path, policy: str, **changes: Any) -> OneShot:
    options = RunOptions(threads=1, device="cpu", gatekeeper=GatekeeperConfig(policy, **QUICK))
    return strategy(OneShotFedAvg, run_dir, options=options, **changes)


def clients_of(run: OneShot) -> list[str]:
    return [upload.client for upload in run.report.job.uploads]


def test_exclude_leaves_a_suspect_out_keeps_its_upload_and_says_why(tmp_path: Path, said: list[str]) -> None:
    run = one_shot(tmp_path / "run", "exclude")

    run.start(grid())

    assert clients_of(run) == ["bob", "carl", "dora"]
    with RunFolder.open(tmp_path / "run", write=False) as folder:
        assert folder.round(1).held() == ["alice", "bob", "carl", "dora"]
    verdict = read_json(tmp_path / "run" / "gatekeeper.json")
    assert verdict["quarantined"] == ["alice"]
    assert [row["harm"] for row in verdict["clients"]] == ["scaled", "", "", ""]
    (line,) = [line for line in said if "alice is suspect" in line]
    assert "times the others': it takes no part in the server stage" in line


def test_too_few_left_fail_the_run_by_name_and_the_uploads_stay(tmp_path: Path) -> None:
    with pytest.raises(QuorumError, match=r"4 uploads arrived and 3 passed .* alice \(scaled: the norm"):
        one_shot(tmp_path / "run", "exclude", min_uploads=4).start(grid())

    with RunFolder.open(tmp_path / "run", write=False) as run:
        assert len(run.round(1).held()) == 4
        assert pinned_clients(run.round(1)) is None


def test_a_resumed_run_keeps_the_first_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuorumError):
        one_shot(tmp_path / "run", "exclude", min_uploads=4).start(grid())
    first = (tmp_path / "run" / "gatekeeper.json").read_bytes()
    monkeypatch.setattr(inspection, "inspect", lambda *_, **__: pytest.fail("it was judged before"))

    run = one_shot(tmp_path / "run", "exclude", min_uploads=3)
    run.start(grid())

    assert clients_of(run) == ["bob", "carl", "dora"]
    assert (tmp_path / "run" / "gatekeeper.json").read_bytes() == first


@pytest.mark.parametrize(("first", "then"), [("warn", "exclude"), ("exclude", "off")])
def test_a_run_that_goes_on_under_another_policy_is_refused(tmp_path: Path, first: str, then: str) -> None:
    one_shot(tmp_path / "run", first).start(grid())

    with pytest.raises(OptionError, match=rf"gatekeeper\.policy is '{then}', but the run in .* began with '{first}'"):
        one_shot(tmp_path / "run", then).start(grid())
