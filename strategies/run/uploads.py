"""The uploads of one round: an accepted one is on the disk, whole, and has its line in the index."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..core import refusals
from ..core.checkpoints import OpenFile
from ..core.durable import atomic_write, make_folder, sha256_file, store_errors
from ..core.errors import StoreError, UploadError, shorten_list
from ..core.facts import CLIENT_NAME, UploadFacts, weights_alone
from ..core.fingerprint import Weights
from ..method import Upload
from .files import JsonLines, read_weights, row_of, weights_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class UploadRecord:
    """The index's record of one accepted upload.

    Attributes:
        sha256: Digest of the stored file, in hex.
        arrived: When it was accepted, ISO 8601 with the offset from UTC.
    """

    facts: UploadFacts
    sha256: str
    bytes: int
    arrived: str

    @property
    def client(self) -> str:
        """The client's name."""
        return self.facts.client

    def as_row(self) -> dict[str, Any]:
        """Return the record as a line of the index holds it: the facts' fields beside its own."""
        own = {"sha256": self.sha256, "bytes": self.bytes, "arrived": self.arrived}
        return {"client": self.client, "architecture": self.facts.architecture, **own, **self.facts.as_row()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> UploadRecord:
        """Return the record of a line; raises what :meth:`UploadFacts.from_row` does."""
        own = {key: row[key] for key in ("sha256", "bytes", "arrived")}
        return cls(UploadFacts.from_row({key: row[key] for key in row if key not in own}), **own)


@dataclass(frozen=True)
class StoredWeights:
    """Reads a stored upload anew at each call; can be pickled.

    Attributes:
        path: The safetensors file, absolute.
        sha256: Its expected digest, in hex.
    """

    path: Path
    sha256: str

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return the weights.

        Raises:
            StoreError: The file is missing or damaged.
        """
        return weights_alone(read_weights(self.path, self.sha256))

    def open(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors as a mapping that reads each when it is asked for, without a look at the digest."""
        return OpenFile(self.path, bare=False)


@dataclass
class _Seen:
    """The part of the index that was read so far.

    Attributes:
        inode: The file that it was read from.
        end: Offset of the first line that was not read.
        records: The lines before, in the order of arrival.
    """

    inode: int = 0
    end: int = 0
    records: list[UploadRecord] = field(default_factory=list)
    _names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, records: list[UploadRecord]) -> None:
        self.records += records
        for record in records:
            self._names.setdefault(record.client.casefold(), []).append(record.client)

    def known(self, client: str) -> list[str]:
        """Return the clients whose names are this one, or differ from it in case alone."""
        return self._names.get(client.casefold(), [])

    def forget(self) -> None:
        self.inode, self.end, self.records, self._names = 0, 0, [], {}


class UploadStore:
    """The uploads in one folder.

    Args:
        path: The folder of the round; files are in ``uploads/``, the index is ``uploads.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _Seen()

    @property
    def index(self) -> JsonLines:
        """The index: one line per accepted upload, in the order of arrival."""
        return JsonLines(self.path / "uploads.jsonl")

    def records(self) -> list[UploadRecord]:
        """Return the accepted uploads, in the order of arrival.

        Raises:
            StoreError: The index is damaged.
        """
        self._look()
        return list(self._seen.records)

    def accept(self, facts: UploadFacts, state: Weights) -> Upload:
        """Store an upload: first the file, then its line in the index; once this returns, it survives any crash.

        Returns:
            The upload, whose ``read`` reads the stored file.

        Raises:
            UploadError: The name is no client name or has an upload already, or the disk is full or refuses; no partial
                file stays, and the folder keeps accepting uploads.
        """
        client = facts.client
        self._refuse_name(client)
        try:
            data = weights_bytes(state)
        except StoreError as error:
            raise refusals.refused(error).of(client) from error
        file = self._file(client)
        arrived = datetime.now(UTC).astimezone().isoformat(timespec="milliseconds")
        record = UploadRecord(facts, hashlib.sha256(data).hexdigest(), len(data), arrived)
        try:
            make_folder(file.parent)
            atomic_write(file, data)
            self.index.append(record.as_row())
        except OSError as error:
            # The index decides: a line that could not be taken back keeps its file.
            with suppress(OSError, StoreError):
                self._look()
                if client not in self._seen.known(client):
                    file.unlink(missing_ok=True)
            raise self._not_stored(file, len(data), error).of(client) from error
        return self._upload(record)

    def uploads(self) -> tuple[Upload, ...]:
        """Return the accepted uploads in the order of client names, after a check of every file.

        Raises:
            StoreError: A file is missing or damaged; the message names it, both digests, and the remedy.
        """
        records = sorted(self.records(), key=lambda record: record.client)
        for record in records:
            verify(self._file(record.client), record.sha256, f"upload of client {record.client!r}")
        return tuple(self._upload(record) for record in records)

    def unlisted(self) -> tuple[str, ...]:
        """Return the names of stored files that the index does not have, which count as not accepted.

        Raises:
            StoreError: The index is damaged, or the folder cannot be read.
        """
        listed = {self._file(record.client).name for record in self.records()}
        with store_errors(self.path):
            found = sorted(path.name for path in (self.path / "uploads").glob("*.safetensors"))
        return tuple(name for name in found if name not in listed)

    def one_of_each(self) -> tuple[Upload, ...]:
        """Return an accepted upload of each architecture; its file is checked when it is read, and no other is."""
        return tuple(map(self._upload, {record.facts.architecture: record for record in self.records()}.values()))

    def _look(self) -> None:
        """Read the lines that are new in the index; with every line at every upload, n of them would cost n squared."""
        seen, path = self._seen, self.index.path
        with store_errors(path):
            if not path.exists():
                seen.forget()
                return
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != seen.inode or status.st_size < seen.end:
                    seen.forget()
                if status.st_size == seen.end:
                    return
                file.seek(seen.end)
                *lines, tail = file.read().split(b"\n")
            rows = [row_of(line) for line in lines]
            whole = [row for row in rows if row is not None]
            if tail or len(whole) < len(rows):
                # A damaged line: ``rows`` raises the error with its remedy.
                seen.forget()
                seen.add([self._record(row) for row in self.index.rows()])
                return
            seen.add([self._record(row) for row in whole])
            seen.inode, seen.end = status.st_ino, seen.end + sum(len(line) + 1 for line in lines)

    def _file(self, client: str) -> Path:
        return self.path / "uploads" / f"{client}.safetensors"

    def _upload(self, record: UploadRecord) -> Upload:
        weights = StoredWeights(self._file(record.client), record.sha256)
        return Upload(record.facts, weights, weights.open)

    def _record(self, row: dict[str, Any]) -> UploadRecord:
        try:
            record = UploadRecord.from_row(row)
            if not CLIENT_NAME.fullmatch(record.client):
                raise ValueError(record.client)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise StoreError(f"{self.index.path}: damaged line {str(row)[:400]}") from error
        return record

    def _refuse_name(self, client: str) -> None:
        if not CLIENT_NAME.fullmatch(client):
            raise refusals.bad_name("client", client, CLIENT_NAME.pattern)
        file = self._file(client)
        self._look()
        for known in self._seen.known(client):
            if known == client:
                raise refusals.second_upload().of(client)
            # Some file systems ignore case: there, writing this file would replace the other client's.
            if file.exists() and file.samefile(self._file(known)):
                raise refusals.same_file(known).of(client)

    def _not_stored(self, file: Path, needed: int, error: OSError) -> UploadError:
        reason = "disk full" if error.errno in _FULL else (error.strerror or str(error))
        try:
            free: object = shutil.disk_usage(self.path).free
        except OSError:
            free = "unknown"
        return refusals.not_stored(reason, file, needed, free)


def verify(file: Path, sha256: str, what: str) -> None:
    """Check that a stored file is the one that was written.

    Args:
        sha256: Its expected digest, in hex.

    Raises:
        StoreError: It is missing or damaged.
    """
    try:
        found = f"found {sha256_file(file)}"
    except OSError as error:
        found = f"found no readable file ({error.strerror})"
    if found != f"found {sha256}":
        raise StoreError(
            f"{file}: damaged {what}, expected sha256 {sha256}, {found}; "
            "put back a copy of this file, or remove its line from uploads.jsonl so that the client is asked again"
        )


def equal_notes(records: Iterable[UploadRecord]) -> list[str]:
    """Return a line for uploads with the same weights, as of a file that was copied twice."""
    clients: dict[str, list[str]] = {}
    for record in records:
        clients.setdefault(record.sha256, []).append(record.client)
    line = "the uploads of {} are equal: must be of clients that train on examples of their own"
    return [line.format(shorten_list(names)) for names in clients.values() if len(names) > 1]
