"""Requests to clients with a state: the round of their last answer that counted, now and at the last checkpoint."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from strategies.flower.rounds.loop import Attendance


def test_a_server_that_resumes_from_a_checkpoint_forgets_later_rounds() -> None:
    attendance = Attendance()
    attendance.accept(1, ["a"])
    kept = attendance.snapshot()
    attendance.accept(2, ["a", "b"])
    attendance.restore(kept)
    assert attendance.last_rounds("a") == {"last-round": 1, "safe-round": 1}
    assert attendance.last_rounds("b") == {"last-round": 0, "safe-round": 0}
    assert kept == {"a": 1}


def test_every_client_gets_its_own_rounds_and_the_shared_request_stays_unchanged() -> None:
    attendance = Attendance()
    attendance.accept(2, ["a"])
    shared = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"lr": 0.5})})
    names = {7: "a", 8: "b", 9: None}
    found = attendance.with_last_rounds(dict.fromkeys(names, shared), names.get)
    assert dict(found[7]["config"]) == {"lr": 0.5, "last-round": 2, "safe-round": 0}
    assert dict(found[8]["config"]) == {"lr": 0.5, "last-round": 0, "safe-round": 0}
    assert dict(found[9]["config"]) == {"lr": 0.5} == dict(shared["config"])
    assert all(content["arrays"] is shared["arrays"] for content in found.values())
