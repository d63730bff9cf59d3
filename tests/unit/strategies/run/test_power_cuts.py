"""Every file of a run and of a client's state, after a power cut at any moment of its writing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from power_cut import PowerCuts
from run_fakes import (
    job_of,
    keep_logits,
    keep_model,
    kept_logits,
    kept_model,
    ledger,
    report_of,
    round_state,
    run_of,
    spend,
    weights,
)  # fmt: skip

from server_app.launch.run_command import RESUME_FILE, leave_resume_file
from strategies.core.durable import read_json, with_digest
from strategies.core.facts import UploadFacts
from strategies.core.fingerprint import weights_sha256
from strategies.method import Snapshot
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder
from strategies.run.stage import keep_outcome, last_finished_round, load_report, pin_clients, pinned_clients
from strategies.run.traffic import Traffic


def opened(root: Path) -> RunFolder:
    return RunFolder.open(root / "run")


@dataclass(frozen=True)
class Case:
    """A file, the way it is written, and the way it is read."""

    name: str
    before: Callable[[Path], Any]
    write: Callable[[Path, Any], Any]
    read: Callable[[Path], Any]
    durable: bool = True  # once the writer has returned, the new content is there


def uploads_in(root: Path) -> list[tuple[str, float]]:
    with opened(root) as run:
        return [(upload.client, upload.read()["bias"].item()) for upload in run.round().uploads()]


def outcome_in(root: Path) -> tuple[int, float, float, float] | None:
    with opened(root) as run:
        if not (done := last_finished_round(run)):
            return None
        kept = load_report(run, job_of(run, done)).outcome
        student, images = run.student(), run.images()
        assert student is not None
        assert images is not None
        assert weights_sha256(student) == weights_sha256(kept.student)
        values = (kept.student["bias"], kept.ensemble.weights["weights"][0], kept.images.float().mean())
        return done, *(float(value) for value in values)  # type: ignore[return-value]


def second_round(root: Path) -> RunFolder:
    run = run_of(root, "a", "b")
    keep_outcome(run, report_of(run, 1.0))
    run.round(2).accept(UploadFacts("a", "x", 1), weights(7))
    return run


def checkpointed(root: Path) -> RunFolder:
    run = run_of(root)
    run.round().save_checkpoint(Snapshot(1, {"w": torch.ones(2)}, {"rows": torch.ones(2, 1)}))
    return run


def checkpoint_in(root: Path) -> tuple[int, float, int] | None:
    with opened(root) as run:
        found = run.round().load_checkpoint()
        return None if found is None else (found.step, found.state["w"][0].item(), len(found.appended["rows"]))


def created(root: Path) -> str:
    with RunFolder.open_or_create(root / "run", {"method": "fedens", "seed": 0}) as run:
        return str(run.info["method"])


def with_facts(file: str, write: Callable[[RunFolder, int], None], read: Callable[[RunFolder], Any]) -> Case:
    def before(root: Path) -> RunFolder:
        run = run_of(root, "a")
        write(run, 0)
        return run

    def found(root: Path) -> Any:
        with opened(root) as run:
            return read(run)

    return Case(file, before, lambda _, run: write(run, 1), found)


def refusals(run: RunFolder) -> list[str]:
    return [row["reason"] for row in run.round().refused()]


def save_traffic(run: RunFolder, number: int) -> None:
    account = Traffic(path=run.path / "traffic.json")
    account.add("upload", "a", up=number)
    account.save()


def kept_by_client(root: Path) -> float | None:
    found = kept_model(root).load()
    return None if found is None else found[0].loss + found[1]["bias"].item()


def states_in(root: Path) -> float:
    return round_state(root).before(9)[1].get("bias", torch.zeros(1)).item()


def save_state(root: Path, server_round: int) -> None:
    round_state(root).save(server_round, weights(server_round))


def logits_in(root: Path) -> float | None:
    found = kept_logits(root).load("e" * 64)
    return None if found is None else float(found.values.sum())


def spent_in(root: Path) -> float:
    return ledger(root).spent()[0]


def accept(run: RunFolder) -> None:
    run.round().accept(UploadFacts("c", "x", 1), weights(5))


def resume_text(run: RunFolder) -> str | None:
    path = run.path / RESUME_FILE
    return path.read_text() if path.exists() else None


def recorded(run: RunFolder) -> int:
    rows = [row["epoch"] for row in run.round().metrics()]
    assert rows == list(range(len(rows)))
    return len(rows)


CASES = [
    Case("run.json", lambda root: None, lambda root, _: created(root), created),
    Case("the first upload", lambda root: run_of(root), lambda _, run: accept(run), uploads_in),
    Case("a third upload", lambda root: run_of(root, "a", "b"), lambda _, run: accept(run), uploads_in),
    with_facts("refusals.jsonl", lambda run, number: run.round().refuse("eve", str(number)), refusals),
    with_facts("stage.json", lambda run, number: (number and pin_clients(run.round(), ["a"])) or None,
               lambda run: pinned_clients(run.round())),
    with_facts("traffic.json", save_traffic, lambda run: Traffic.read(run.path / "traffic.json").up.get("a")),
    with_facts("result.json", lambda run, number: run.write_result({"accuracy": number}), lambda run: run.result()),
    with_facts("gatekeeper.json", lambda run, number: write_json(run.path / "gatekeeper.json", {"n": number}),
               lambda run: read_json(run.path / "gatekeeper.json")),
    with_facts("resume.toml", lambda run, number: leave_resume_file(run.path, {"seed": number}), resume_text),
    replace(with_facts("metrics.jsonl", lambda run, number: run.round().record({"epoch": number}), recorded),
            durable=False),
    Case("the first checkpoint", lambda root: run_of(root), lambda _, run: run.round().save_checkpoint(
        Snapshot(2, {"w": torch.zeros(2)}, {"rows": torch.ones(1, 1)})), checkpoint_in),
    Case("a second checkpoint", checkpointed, lambda _, run: run.round().save_checkpoint(
        Snapshot(2, {"w": torch.zeros(2)}, {"rows": torch.ones(1, 1)})), checkpoint_in),
    Case("an outcome", lambda root: run_of(root, "a", "b"), lambda _, run: keep_outcome(run, report_of(run, 1.0)),
         outcome_in),
    Case("the outcome of a second round", second_round,
         lambda _, run: keep_outcome(run, report_of(run, 2.0, 2), 2), outcome_in),
    Case("a client's first training", lambda root: None, lambda root, _: keep_model(root, 1.0), kept_by_client),
    Case("a client's first state", lambda root: None, lambda root, _: save_state(root, 1), states_in),
    Case("a client's third state", lambda root: [save_state(root, 1), save_state(root, 2)],
         lambda root, _: save_state(root, 3), states_in),
    Case("a client's logits", lambda root: None, lambda root, _: keep_logits(root), logits_in),
    Case("a ledger", lambda root: None, lambda root, _: spend(root, "one"), spent_in),
    Case("a second entry of a ledger", lambda root: spend(root, "one"), lambda root, _: spend(root, "two"), spent_in),
]  # fmt: skip


def check(case: Case, tmp_path: Path, *, most: int) -> int:
    """Return how many folders a power cut may leave, each with the old content or the new one."""
    root = tmp_path / "disk"
    root.mkdir()
    held = case.before(root)
    old = case.read(shutil.copytree(root, tmp_path / "old"))
    with PowerCuts(root) as disk:
        case.write(root, held)
    new = case.read(shutil.copytree(root, tmp_path / "new"))
    count = 0
    for folder in disk.folders(tmp_path / "cut", most=most):
        count += 1
        assert case.read(folder) in (old, new), folder
        shutil.rmtree(folder)
    for folder in disk.folders(tmp_path / "after", most=most, last=True) if case.durable else ():
        assert case.read(folder) == new, folder
    return count


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_power_cut_leaves_the_old_content_or_the_new(case: Case, tmp_path: Path) -> None:
    assert check(case, tmp_path, most=200) > 5


def test_a_writer_that_does_not_sync_is_caught(tmp_path: Path) -> None:
    def unsynced(root: Path, _: Any) -> None:
        (root / ".x.tmp").write_text(json.dumps(with_digest({"n": 1})))
        (root / ".x.tmp").replace(root / "x.json")

    case = Case(
        "x.json", lambda root: None, unsynced, lambda root: (root / "x.json").exists() and read_json(root / "x.json")
    )

    with pytest.raises(Exception, match=r"x\.json: damaged"):
        check(case, tmp_path, most=100)
