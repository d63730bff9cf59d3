"""The gatekeeper of a run: judges the uploads of a round once, keeps the verdict, and excludes clients by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compute import ServerCompute
from ..core.durable import read_json
from ..core.errors import ComputeError, QuorumError
from ..core.stage_options import EXCLUDE, NONE, OFF, GatekeeperConfig
from ..gatekeeper.verdicts import Inspection
from ..method import Job, Method, Upload
from ..uploads.needs import check_alone
from .files import write_json
from .round_folder import RoundFolder
from .run_folder import RunFolder
from .stage import CHECKPOINT_S, StageReport, last_round, pin_clients, pinned_clients, replay, usable_uploads
from .uploads import UploadRecord

GATEKEEPER_FILE = "gatekeeper.json"  # one per round of uploads


@dataclass(frozen=True)
class Gatekeeper:
    """The tests that a round's uploads have to pass before the server stage."""

    config: GatekeeperConfig
    min_uploads: int
    log: Callable[[str], None]
    tick: Callable[[], None] | None = None

    @property
    def judges(self) -> bool:
        """Whether uploads are judged at all."""
        return self.config.policy != OFF

    def admit(
        self, folder: RoundFolder, job: Job, uploads: Sequence[Upload], records: Iterable[UploadRecord]
    ) -> set[str]:
        """Judge uploads, unless the folder holds a verdict on the same ones, and return the quarantined clients.

        Call it only if :attr:`judges` is true.

        Args:
            folder: The round's folder, which keeps the verdict.
            job: The job; its uploads are ignored.
            records: The records of the uploads, in the order of arrival.

        Raises:
            QuorumError: Too few uploads are left; the error names the quarantined clients and the reasons.
        """
        names = {upload.client for upload in uploads}
        digests = {record.client: record.sha256 for record in records if record.client in names}
        kept = load_verdict(folder)
        if kept is None or kept["uploads"] != digests:
            inspection = self._inspect(replace(job, uploads=tuple(uploads)), tuple(digests))
            suspects = list(inspection.suspects) if self.config.policy == EXCLUDE else []
            kept = {
                "policy": self.config.policy,
                "quarantined": suspects,
                "uploads": digests,
                **inspection.as_json(),
            }
            write_json(folder.path / GATEKEEPER_FILE, kept)
        self._check_quorum(kept, len(uploads))
        return set(kept["quarantined"])

    def _inspect(self, job: Job, arrived: Sequence[str]) -> Inspection:
        # A late import: a run without a gatekeeper needs none of it.
        from ..compute.in_process import torch_as_usual
        from ..compute.threads import steady_threads
        from ..core.gpu import resolve_device
        from ..gatekeeper.inspection import inspect
        from .journal import Journal

        try:
            device = resolve_device(job.device)
        except ComputeError:  # the server stage's GPU is on another machine
            device = "cpu"
        journal = Journal(None, self.log, label="gatekeeper", unit="percent", tick=self.tick)
        with journal, torch_as_usual(steady_threads(job)):
            inspection = inspect(replace(job, device=device), self.config, arrived=arrived, progress=journal)
        for line in lines_of(inspection, self.config.policy):
            self.log(f"gatekeeper: {line}")
        return inspection

    def _check_quorum(self, kept: Mapping[str, Any], count: int) -> None:
        left = count - len(kept["quarantined"])
        if kept["quarantined"] and left < self.min_uploads:
            reasons = [f"{row['client']} ({_reason(row)})" for row in kept["clients"] if row["findings"]]
            raise QuorumError(
                f"{count} uploads arrived and {left} passed the gatekeeper, min-uploads is {self.min_uploads}. "
                f"Quarantined: {', '.join(reasons)}. A replay with gatekeeper.policy=warn takes them"
            )


def load_verdict(folder: RoundFolder) -> dict[str, Any] | None:
    """Return the gatekeeper's verdict on a round, None if there was no inspection.

    Raises:
        StoreError: The file is damaged.
    """
    path = folder.path / GATEKEEPER_FILE
    verdict: dict[str, Any] | None = read_json(path) if path.exists() else None
    return verdict


def lines_of(inspection: Inspection, policy: str) -> list[str]:
    """Return the log lines of an inspection: the table, the tests that were skipped, and every finding."""
    lines = inspection.table() if any(row.measures for row in inspection.rows) else []
    lines += inspection.notes
    done = "it takes no part in the server stage; its upload stays stored" if policy == EXCLUDE else "it takes part"
    lines += [f"{row.client} is suspect, {row.reason}: {done}" for row in inspection.rows if row.findings]
    if not inspection.suspects and lines != list(inspection.notes):
        lines.append(f"no upload of {len(inspection.rows)} looks harmful")
    return lines


def quarantined_clients(folder: RoundFolder) -> tuple[str, ...]:
    """Return the clients that the verdict excludes from the server stage of a round."""
    verdict = load_verdict(folder)
    return () if verdict is None else tuple(verdict["quarantined"])


def guarded_replay(  # noqa: PLR0913  what a replay needs
    gatekeeper: Gatekeeper,
    method: Method,
    job: Job,
    source: Path,
    *,
    compute: ServerCompute,
    target: RunFolder,
    checkpoint_s: float = CHECKPOINT_S,
    finish: str = NONE,
) -> StageReport:
    """Judge the stored uploads of a run, keep the verdict in the replay's folder, and replay: :func:`.stage.replay`.

    Raises:
        StoreError: ``source`` holds no uploads, or a damaged one.
        QuorumError: Too few uploads pass.
    """
    if gatekeeper.judges and pinned_clients(target.round(1)) is None:
        with RunFolder.open(source, write=False) as run:
            held = last_round(run)
            uploads, records = usable_uploads(held), held.records()
        if uploads:
            check_alone(method, replace(job, uploads=uploads))
            out = gatekeeper.admit(target.round(1), job, uploads, records)
            pin_clients(target.round(1), [upload.client for upload in uploads], out)
    log = gatekeeper.log
    return replay(
        method, job, source, compute=compute, target=target, log=log, checkpoint_s=checkpoint_s, finish=finish
    )


def _reason(row: Mapping[str, Any]) -> str:
    return "; ".join(f"{found['kind']}: {found['text']}" for found in row["findings"])
