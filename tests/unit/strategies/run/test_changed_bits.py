"""A changed bit in any byte of a run or of a client's state: the same result, or a line with the file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fakes import (
    described,
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

from strategies.core.errors import StoreError
from strategies.method import Snapshot
from strategies.run.files import LOCK_NAME, write_json
from strategies.run.quarantine import load_verdict
from strategies.run.run_folder import RunFolder
from strategies.run.stage import keep_outcome, last_finished_round, load_report, pin_clients, pinned_clients
from strategies.run.traffic import Traffic


def half_finished(root: Path) -> None:
    """Make a run that was cut off in its server stage."""
    with run_of(root, "a", "b") as run:
        work = run.round()
        work.refuse("eve", "no")
        account = Traffic(path=run.path / "traffic.json")
        account.add("upload", "a", up=12345)
        account.save()
        write_json(run.path / "gatekeeper.json", {"quarantined": [], "uploads": {}})
        pin_clients(work, ["a", "b"])
        for epoch in range(3):
            work.record({"epoch": epoch, "accuracy": 0.5 + epoch / 10})
        work.save_checkpoint(Snapshot(2, {"w": torch.ones(2), "rate": 0.125}, {"rows": torch.ones(2, 1)}))


def finished(root: Path) -> None:
    """Make a run that has everything."""
    half_finished(root)
    with RunFolder.open(root / "run") as run:
        keep_outcome(run, report_of(run, 5.0))
        run.write_result({"status": "finished", "accuracy": 93.25})


def run_in(root: Path) -> Any:
    """Return everything that a resume or a reader gets from a run."""
    with RunFolder.open(root / "run") as run:
        work, checkpoint = run.round(), run.round().load_checkpoint()
        job = job_of(run)
        report = load_report(run, job) if last_finished_round(run) else None
        return described(
            {
                "info": run.info,
                "uploads": [(each.client, each.architecture, each.read(), each.label_counts) for each in job.uploads],
                "records": work.records(),
                "refused": work.refused(),
                "metrics": work.metrics(),
                "pinned": pinned_clients(work),
                "verdict": load_verdict(work),
                "traffic": Traffic.read(run.path / "traffic.json").as_json(),
                "checkpoint": checkpoint and (checkpoint.step, checkpoint.state, dict(checkpoint.appended)),
                "outcome": report and (report.outcome.student, report.outcome.images, report.seconds),
                "ensemble": report and report.outcome.ensemble and report.outcome.ensemble.weights,
                "student": run.student(),
                "result": run.result(),
            },
            ordered=False,
        )


def client_state(root: Path) -> None:
    """Make everything that a client keeps."""
    keep_model(root, 0.25)
    round_state(root).save(1, weights(2.0))
    keep_logits(root)
    spend(root, "r")


def state_in(root: Path) -> Any:
    """Return everything that a client reads again; what it finds damaged is a warning, and counts as nothing."""
    logits, memory = kept_logits(root).load("e" * 64), round_state(root).recall(2, 1)
    return described(
        [kept_model(root).load(), memory.state, logits and vars(logits), ledger(root).releases()], ordered=False
    )


# Something on the disk: how it comes to be, and how it is read.
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "finished": (finished, run_in), "half-finished": (half_finished, run_in), "client": (client_state, state_in),
}  # fmt: skip


def read_or_said(read: Callable[[Path], Any], root: Path) -> tuple[Any, list[str]]:
    """Return the content read, or the line of the error that ends the reading."""
    try:
        return read(root), []
    except StoreError as error:
        return None, str(error).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_changed_bit_of_every_byte_gives_the_same_result_or_a_line_with_the_file(
    name: str, tmp_path: Path, said: list[str]
) -> None:
    (make, read), rng = KINDS[name], random.Random(0)
    make(tmp_path)
    wanted = read(tmp_path)
    assert not said
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK_NAME):
        data = file.read_bytes()
        for byte in range(len(data)):
            now = bytearray(data)
            now[byte] ^= 1 << rng.randrange(8)
            file.write_bytes(now)
            said.clear()
            found, lines = read_or_said(read, tmp_path)
            assert found == wanted or any(file.name in line for line in (*lines, *said)), (file, byte, lines)
        file.write_bytes(data)
        assert read(tmp_path) == wanted
