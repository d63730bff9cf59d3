"""A changed bit in any byte of a run or of a client's state: the same result, or a line with the file."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.keeping import KeptModel, Trained
from fl_app.ledger import Ledger
from fl_app.node_policy import FREE
from fl_app.privacy import PrivacyConfig
from strategies.client.logits import LogitCache, Logits
from strategies.client.round_state import RoundState
from strategies.core.errors import StoreError
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec, Job, Normalization, Outcome, Snapshot
from strategies.methods.fedens import METHOD
from strategies.run.files import LOCK_NAME, write_json
from strategies.run.quarantine import load_verdict
from strategies.run.run_folder import RunFolder
from strategies.run.stage import (
    StageReport,
    keep_outcome,
    last_finished_round,
    load_report,
    pin_clients,
    pinned_clients,
)
from strategies.run.traffic import Traffic

RUN = "0123456789abcdef" * 2
BUILDERS = {"x": lambda: torch.nn.Linear(1, 1)}


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 1), value), "bias": torch.full((1,), value)}


def job_of(run: RunFolder) -> Job:
    return Job(uploads=run.round().uploads(), builders=BUILDERS, student="x", num_classes=1, input_shape=(1, 1, 1),
               normalization=Normalization((0.0,), (1.0,)), config=METHOD.config())  # fmt: skip


def half_finished(root: Path) -> None:
    """Make a run that was cut off in its server stage."""
    with RunFolder.create(root / "run", {"method": "fedens", "seed": 0}) as run:
        work = run.round()
        for number, client in enumerate(("a", "b"), start=1):
            ranges = {"layer": (0.0, float(number))}
            work.accept(UploadFacts(client, "x", number, (number, 1), ranges=ranges), weights(number))
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
        spec = EnsembleSpec(("a", "b"), "weighted", {"weights": torch.tensor([0.25, 0.75])})
        images = torch.ones((1, 1, 2, 2), dtype=torch.uint8)
        keep_outcome(run, StageReport(Outcome(weights(5.0), spec, {"fit": 1.0}, images), job_of(run), 0, 1.0))
        run.write_result({"status": "finished", "accuracy": 93.25})


def run_in(root: Path) -> Any:
    """Return everything that a resume or a reader gets from a run."""
    with RunFolder.open(root / "run") as run:
        work, checkpoint = run.round(), run.round().load_checkpoint()
        job = job_of(run)
        report = load_report(run, job) if last_finished_round(run) else None
        return _plain(
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
            }
        )


def client_state(root: Path) -> None:
    """Make everything that a client keeps."""
    state = str(root / "state")
    KeptModel(state, RUN, "a", 1).save(
        Trained(UploadFacts("a", "x", 3, (1, 2), ranges={"layer": (0.0, 1.0)}), 0.25, 0.5), weights(1.0)
    )
    memory = RoundState(root / "state" / RUN, "a")
    memory.save(1, weights(2.0))
    logits = Logits(("m",), np.full((1, 2, 3), 0.5, np.float32), np.zeros(2, np.int64), np.ones((2, 4), np.float32))
    LogitCache(state, RUN, "a").save("e" * 64, logits)
    Ledger.of(root / "state", "a").enter(PrivacyConfig(epsilon=8.0), FREE, run="r", server_round=1)


def state_in(root: Path) -> Any:
    """Return everything that a client reads again; what it finds damaged is a warning, and counts as nothing."""
    state, logits = str(root / "state"), LogitCache(str(root / "state"), RUN, "a").load("e" * 64)
    arrays = logits and (logits.members, logits.values.tolist(), logits.labels.tolist(), logits.inputs.tolist())
    memory = RoundState(root / "state" / RUN, "a").recall(2, 1)
    return _plain(
        [KeptModel(state, RUN, "a", 1).load(), memory.state, arrays, Ledger.of(root / "state", "a").releases()]
    )


def _plain(value: Any) -> str:
    """Return a text that differs where any value or type differs."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_plain(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    return repr(value)


@dataclass(frozen=True)
class Kind:
    """Something on the disk, how it comes to be and how it is read."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]


KINDS = {
    "finished": Kind(finished, run_in),
    "half-finished": Kind(half_finished, run_in),
    "client": Kind(client_state, state_in),
}


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != LOCK_NAME)


def changed(data: bytes, bits: range | list[int]) -> Iterator[tuple[int, bytes]]:
    for bit in bits:
        found = bytearray(data)
        found[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(found)


def check_file(kind: Kind, root: Path, file: Path, bits: range | list[int], said: list[str]) -> None:
    """Change one bit after the other, and compare the result of reading with the content written."""
    data, wanted = file.read_bytes(), kind.read(root)
    for bit, now in changed(data, bits):
        file.write_bytes(now)
        said.clear()
        found, lines = _read_or_said(kind, root)
        assert found == wanted or any(file.name in line for line in (*lines, *said)), (file, bit, now, lines)
        file.write_bytes(data)
    assert kind.read(root) == wanted


def _read_or_said(kind: Kind, root: Path) -> tuple[Any, list[str]]:
    """Return the content read, or the line of the error that ends the reading."""
    try:
        return kind.read(root), []
    except StoreError as error:
        return None, str(error).splitlines()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("flwr"), "warning", lambda text, *given: lines.append(text % given))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_changed_bit_of_every_byte_gives_the_same_result_or_a_line_with_the_file(
    name: str, tmp_path: Path, said: list[str]
) -> None:
    kind, rng = KINDS[name], random.Random(0)
    kind.make(tmp_path)
    for file in files_of(tmp_path):
        bits = [8 * byte + rng.randrange(8) for byte in range(file.stat().st_size)]
        check_file(kind, tmp_path, file, bits, said)
