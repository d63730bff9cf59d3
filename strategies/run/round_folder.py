"""The files of one round of a run: its uploads, refusals, the server stage's checkpoint and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core.durable import make_folder, remove_temporaries, store_errors
from ..core.errors import StoreError
from ..core.facts import UploadFacts
from ..core.fingerprint import Weights
from ..method import Snapshot, Upload
from .checkpoint import CheckpointFolder
from .files import FolderLock, JsonLines
from .uploads import UploadStore


class RoundFolder(UploadStore):
    """The folder of one round; round 1 is the run folder itself.

    Args:
        path: The folder; made when first needed.
        lock: The run folder's lock; None for reading only.
    """

    def __init__(self, path: Path, lock: FolderLock | None) -> None:
        super().__init__(path)
        self._lock = lock
        self._refusals = JsonLines(path / "refusals.jsonl", strict=False)
        self._unwritten: list[dict[str, Any]] = []
        self._metrics = JsonLines(path / "metrics.jsonl", strict=False)
        self._checkpoint = CheckpointFolder(path / "checkpoint")

    def accept(self, facts: UploadFacts, state: Weights) -> Upload:
        """Store an upload, see :meth:`.uploads.UploadStore.accept`.

        Raises:
            StoreError: The folder is open for reading only.
        """
        self._writing()
        return super().accept(facts, state)

    def refuse(self, client: str, reason: str) -> None:
        """Note that an upload was refused, and why.

        A disk that refuses this line does not end the round: then it is kept in memory.

        Raises:
            StoreError: The folder is open for reading only.
        """
        self._writing()
        time = datetime.now(UTC).astimezone().isoformat(timespec="milliseconds")
        row = {"client": client, "reason": reason, "time": time}
        try:
            self._append(self._refusals, row, sync=True)
        except StoreError:
            self._unwritten.append(row)

    def held(self) -> list[str]:
        """Return the names of the clients whose uploads are accepted, sorted."""
        return sorted(record.client for record in self.records())

    def refused(self) -> list[dict[str, Any]]:
        """Return the refusals in order: ``client``, ``reason``, ``time``."""
        with store_errors(self._refusals.path):
            return [*self._refusals.rows(), *self._unwritten]

    def save_checkpoint(self, snapshot: Snapshot) -> None:
        """Replace the server stage's checkpoint; a crash at any moment leaves the old one or the new one.

        Raises:
            StoreError: The disk refuses; the checkpoint before stays.
        """
        self._writing()
        with store_errors(self._metrics.path):
            # A resumed stage adds no row of an epoch before its checkpoint, so those must be there by then.
            self._metrics.sync()
        self._checkpoint.save(snapshot)

    def load_checkpoint(self) -> Snapshot | None:
        """Return the checkpoint, with all appended rows, or None.

        Raises:
            StoreError: It is damaged.
        """
        return self._checkpoint.load()

    def clear_checkpoint(self) -> None:
        """Forget the checkpoint.

        Raises:
            StoreError: The disk refuses.
        """
        self._writing()
        self._checkpoint.clear()

    def record(self, row: Mapping[str, Any]) -> None:
        """Add a row to the metrics; numbers that are not finite become null.

        Raises:
            StoreError: The disk refuses.
        """
        self._append(self._metrics, row, sync=False)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the metrics."""
        with store_errors(self._metrics.path):
            return self._metrics.rows()

    def truncate_metrics(self, epoch: int) -> None:
        """Drop rows whose ``"epoch"`` is beyond a checkpoint, so that a resumed stage records every epoch once.

        Args:
            epoch: The last epoch to keep; rows without an epoch stay.

        Raises:
            StoreError: The disk refuses.
        """
        self._writing()
        with store_errors(self._metrics.path):
            self._metrics.keep(lambda row: not (isinstance(row.get("epoch"), (int, float)) and row["epoch"] > epoch))

    def repair(self) -> None:
        """Remove the partial files of a killed writer; called once by the next writer, before anything else.

        Raises:
            StoreError: The index of uploads is damaged beyond a torn last line, or the disk refuses.
        """
        self._writing()
        with store_errors(self.path):
            remove_temporaries(self.path)
            for lines in (self.index, self._refusals, self._metrics):
                lines.repair()

    def _append(self, lines: JsonLines, row: Mapping[str, Any], *, sync: bool) -> None:
        self._writing()
        with store_errors(lines.path):
            make_folder(self.path)
            lines.append(row, sync=sync)

    def _writing(self) -> None:
        if self._lock is None or not self._lock.held:
            raise StoreError(f"{self.path}: run folder is open for reading only")
