"""Files that are either whole or absent, folders whose names survive a power cut, and JSON that carries its digest.

This module loads neither torch nor numpy: a client's lightest messages use it too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import StoreError

# A process that is killed while it writes leaves a file of this pattern behind; nothing ever reads one.
TEMPORARY_PATTERN = ".*.tmp"
# The key of a JSON object's own digest.
DIGEST = "digest"
MIB = 2**20  # bytes
# The names of folders that become a result, or hold its parts.
_STAGED = re.compile(r"\.(?:.+\.)?[a-z0-9_]{8}\.tmp")


def atomic_write(path: Path, data: bytes | memoryview | Iterable[bytes | memoryview]) -> None:
    """Write a file so that a crash at any moment leaves the old content or the new one, never a part.

    Args:
        path: The file; its folder must exist.
        data: Its content, whole or in pieces.

    Raises:
        OSError: The disk is full or refuses; the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.writelines((data,) if isinstance(data, bytes | memoryview) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def staged(parent: Path, name: str, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a new hidden folder, which the block may rename; else it is removed.

    Folders that killed processes left there are removed first. Those of living processes have a lock, and stay.

    Args:
        ours: Whether a folder of such a name is one that this function made, by its content; an empty one is not, for
            another process may be about to lock it.

    Raises:
        OSError: It cannot be made.
    """
    for left in parent.glob(TEMPORARY_PATTERN):
        with suppress(OSError):  # another process has just removed it
            if _STAGED.fullmatch(left.name) and left.is_dir() and ours(left):
                with locked(left):
                    shutil.rmtree(left, ignore_errors=True)
    folder = parent / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
    folder.mkdir()
    try:
        with locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder's lock, which ends with this process.

    Args:
        folder: The folder; it must exist.
        wait: Whether to wait for another process that holds it.

    Raises:
        OSError: Another process holds it, or the file system has no locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files behind them.

    Raises:
        OSError: The disk refuses. File systems that cannot sync a folder at all are let pass.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it; nothing happens if it exists.

    Args:
        mode: Its permissions, less the umask; of those above it only the umask decides.

    Raises:
        OSError: It cannot be made.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=mode, exist_ok=True)
        sync_folder(folder.parent)


def make_empty_folder(folder: Path) -> None:
    """Make a folder for a result; one that is there must be empty.

    Raises:
        StoreError: The folder holds files, or the disk refuses.
    """
    with store_errors(folder):
        if folder.is_dir() and any(folder.iterdir()):
            raise StoreError(f"{folder} holds files: must be a new or empty folder")
        make_folder(folder)


def remove_temporaries(folder: Path) -> None:
    """Remove the leftovers of killed writers in a folder and below; only its single writer may call this."""
    for leftover in folder.rglob(TEMPORARY_PATTERN):
        with suppress(OSError):
            leftover.unlink()


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hex.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_digest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON facts with their digest as the last entry, the place in which :func:`verify_digest` reads it.

    Args:
        facts: JSON values with finite numbers; keys are texts.

    Raises:
        ValueError: A number is not finite.
        TypeError: A value has no form in JSON.
    """
    body = {key: value for key, value in facts.items() if key != DIGEST}
    return {**body, DIGEST: _digest_of(body)}


def verify_digest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON facts without their digest, after the comparison.

    Raises:
        ValueError: The facts have another digest, or none as their last entry.
    """
    body = dict(facts)
    if next(reversed(body), "") != DIGEST or body.pop(DIGEST) != _digest_of(body):
        raise ValueError("its digest differs from that of its content")
    return body


def _digest_of(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_facts(path: Path, facts: Any) -> None:
    """Write JSON, atomically; an object is written with its digest.

    Raises:
        StoreError: The disk refuses, or a value has no form in JSON.
    """
    try:
        text = json.dumps(with_digest(facts) if isinstance(facts, Mapping) else facts, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: {error}") from error
    with store_errors(path):
        atomic_write(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read JSON, and compare an object with its digest.

    Raises:
        StoreError: The file is absent, damaged, or differs from its digest.
    """
    with store_errors(path):
        data = Path(path).read_bytes()
    try:
        facts = json.loads(data)
        return verify_digest(facts) if isinstance(facts, dict) else facts
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: damaged, no JSON that was written whole ({error})") from error
