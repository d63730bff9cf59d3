"""A run folder: everything that one run leaves behind, and everything that it needs to resume after a crash."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..core.durable import TEMPORARY_PATTERN, make_folder, read_json, store_errors, sync_folder
from ..core.errors import OptionError, StoreError
from ..core.facts import Normalization
from ..core.fingerprint import Weights, weights_sha256
from ..core.options import flatten, named_as_today
from ..core.places import expand_user, nearest_existing
from ..method import Job
from ..run import FACTS_FILE, RESULT_FILE, RUNS_VARIABLE, app_runs_folder, check_run_folder, is_run_folder
from ..uploads.checks import Signatures
from .ensembles import load_ensemble
from .files import LOCK_NAME, FolderLock, plain, read_equal_weights, save_weights, write_json
from .round_folder import RoundFolder
from .uploads import StoredWeights, UploadRecord

__all__ = [
    "STUDENT_FILE",
    "RoundFolder",
    "RunFolder",
    "StoredWeights",
    "UploadRecord",
    "default_run_dir",
    "load_ensemble",
]

STUDENT_FILE = "student.safetensors"
START_FILE, START_FACTS = "start.safetensors", "start.json"
IMAGES_FILE = "images.safetensors"
OUTCOME_FILE = "outcome.json"
_PACKAGES = ("oneshot-fl", "torch", "torchvision", "flwr", "ray", "numpy", "safetensors")


class RunFolder:
    """One run on disk. Made by :meth:`create` or :meth:`open`; a context manager that closes it.

    Attributes:
        path: The folder, absolute.
    """

    def __init__(self, path: Path, info: Mapping[str, Any], lock: FolderLock | None) -> None:
        self.path = path
        self._info = dict(info)
        self._lock = lock

    @classmethod
    def create(cls, path: Path, info: Mapping[str, Any]) -> RunFolder:
        """Make a run folder, write ``run.json`` first, and become its writer.

        Args:
            path: An empty folder, or an absent one, which is then made for this user alone.
            info: The identity of the run (method, config, seed, threads), as JSON values. ``id`` (hex), ``created``
                (ISO 8601), ``pid`` and ``versions`` are added.

        Raises:
            StoreError: The folder is not empty, cannot be written, or has another writer.
        """
        path = expand_user(path).absolute()
        with store_errors(path):
            make_folder(path, 0o700)  # weights can reveal data; to let others read, make the folder beforehand
            _refuse_occupied(path)
            lock = FolderLock(path)
        try:
            _refuse_occupied(path)
            own = {"id": uuid.uuid4().hex, "created": _now(), "pid": os.getpid(), "versions": _versions()}
            write_json(path / FACTS_FILE, {**info, **own})
            with store_errors(path):
                sync_folder(path.parent)
            return cls(path, read_json(path / FACTS_FILE), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> RunFolder:
        """Open a run folder, as its only writer or as one of many readers.

        Args:
            write: Become its writer; the leftovers of a killed writer are then removed.

        Raises:
            StoreError: It is no run folder, is damaged or not writable, or has another writer (named by its pid).
        """
        path = expand_user(path).absolute()
        check_run_folder(path)
        info = read_json(path / FACTS_FILE)
        if not isinstance(info, dict) or not isinstance(info.get("id"), str):
            raise StoreError(f"{path / FACTS_FILE}: damaged, it has no id")
        if isinstance(info.get("settings"), dict):
            info["settings"] = named_as_today(info["settings"])
        lock = FolderLock(path) if write else None
        if lock is not None:
            try:
                for folder in (path, *path.glob("round-*")):
                    RoundFolder(folder, lock).repair()
            except BaseException:
                lock.release()
                raise
        return cls(path, info, lock)

    @classmethod
    def open_or_create(cls, path: Path, info: Mapping[str, Any]) -> RunFolder:
        """Open the run folder at ``path`` for writing, or make it if there is none; see :meth:`create`."""
        return cls.open(path) if is_run_folder(expand_user(path)) else cls.create(path, info)

    def close(self) -> None:
        """Stop being the writer; the folder can still be read."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The run's identity, in hex; it stays the same when the folder moves."""
        return str(self._info["id"])

    @property
    def info(self) -> dict[str, Any]:
        """The content of ``run.json``."""
        return dict(self._info)

    def round(self, n: int = 1) -> RoundFolder:
        """Return the folder of round ``n``, counted from 1; round 1 is the run folder itself.

        Raises:
            StoreError: The round does not exist.
        """
        if n < 1:
            raise StoreError(f"{self.path}: round {n} does not exist, the first is 1")
        return RoundFolder(self.path if n == 1 else self.path / f"round-{n}", self._lock)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the run's result; a run with a result is finished.

        Raises:
            StoreError: The disk refuses.
        """
        self._writing()
        write_json(self.path / RESULT_FILE, result)

    def result(self) -> dict[str, Any] | None:
        """Return the result, or None if the run has not finished.

        Raises:
            StoreError: The result is damaged.
        """
        if not (self.path / RESULT_FILE).exists():
            return None
        result: dict[str, Any] = read_json(self.path / RESULT_FILE)
        return result

    def save_start(self, state: Weights) -> None:
        """Write the weights that the server sent its clients to start from; those of a resumed run must be the same.

        Raises:
            OptionError: The run began with others.
            StoreError: The disk refuses.
        """
        self._writing()
        facts, digest = self.path / START_FACTS, weights_sha256(state)
        if not facts.exists():
            save_weights(self.path / START_FILE, state)
            write_json(facts, {"weights-sha256": digest})
        elif (begun := read_json(facts)["weights-sha256"]) != digest:
            raise OptionError(
                f"initial_arrays have sha256 {digest[:12]}, but the run in {self.path} began with {str(begun)[:12]}: "
                "resume with the same arrays, or name another run_dir"
            )

    def start(self) -> dict[str, torch.Tensor] | None:
        """Return the weights that the clients started from, if the server sent any.

        Raises:
            StoreError: They are damaged.
        """
        facts = self.path / START_FACTS
        if not facts.exists():
            return None
        return read_equal_weights(self.path / START_FILE, str(read_json(facts)["weights-sha256"]))

    def student(self) -> dict[str, torch.Tensor] | None:
        """Return the weights of the resulting model, or None if the run has none.

        Raises:
            StoreError: The file is damaged, or differs from the digest in the outcome's facts.
        """
        path = self.path / STUDENT_FILE
        facts = self.outcome() or {}
        return read_equal_weights(path, facts.get("student") and facts["weights-sha256"]) if path.exists() else None

    def outcome(self) -> dict[str, Any] | None:
        """Return the facts of the last finished round's outcome, or None if no round has finished.

        Raises:
            StoreError: They are damaged.
        """
        path = self.path / OUTCOME_FILE
        if not path.exists():
            return None
        facts: dict[str, Any] = read_json(path)
        return facts

    def images(self) -> torch.Tensor | None:
        """Return the sample of synthetic images [N, ch, H, W] in uint8, or None.

        Raises:
            StoreError: The file is damaged, or differs from the digest in the outcome's facts.
        """
        path = self.path / IMAGES_FILE
        facts = self.outcome() or {}
        return read_equal_weights(path, facts.get("images-sha256"))["images"] if path.exists() else None

    def _writing(self) -> None:
        if self._lock is None or not self._lock.held:
            raise StoreError(f"{self.path}: run folder is open for reading only")


def info_of(path: Path) -> dict[str, Any]:
    """Return the content of a run's run.json.

    Raises:
        StoreError: The folder is no run folder.
    """
    with RunFolder.open(path, write=False) as folder:
        return folder.info


def default_run_dir(run_dir: str, name: str, *, parent: Path | None = None) -> Path:
    """Return the folder of a new run; nothing is made yet.

    Args:
        run_dir: The folder that the user chose, or an empty string.
        parent: The parent of a new folder; None for that of a ServerApp, see :func:`strategies.run.app_runs_folder`.

    Returns:
        ``run_dir`` if given, else ``<time>-<name>-<id>`` in the parent; absolute.

    Raises:
        StoreError: The folder cannot be written to, or holds other files.
    """
    if run_dir:
        named = expand_user(run_dir).absolute()
        there = nearest_existing(named)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise StoreError(f"run-dir {named}: {there} is not a folder that can be written to")
        if there == named and not is_run_folder(named):
            with store_errors(named):
                _refuse_occupied(named)
        return named
    runs = app_runs_folder(str(parent or ""))
    if str(runs).encode(errors="replace").decode() != str(runs):
        raise StoreError(f"{os.fsencode(runs)!r}: not UTF-8, as the settings of a run are; name a folder by run-dir")
    there = nearest_existing(runs)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise StoreError(
            f"{runs}: not writable, so there is no place for the run; name one by run-dir or {RUNS_VARIABLE}"
        )
    return runs / f"{datetime.now():%Y%m%d-%H%M%S}-{name}-{uuid.uuid4().hex[:6]}"


def _refuse_occupied(path: Path) -> None:
    if is_run_folder(path):
        raise StoreError(f"{path}: a run folder is here already; resume it, or name another")
    strangers = [p.name for p in path.iterdir() if p.name != LOCK_NAME and not p.match(TEMPORARY_PATTERN)]
    if strangers:
        raise StoreError(f"{path}: not empty ({sorted(strangers)[0]} is there); a new run needs a folder of its own")


def _now() -> str:
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def open_run(path: Path, method: str, job: Job, *, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> RunFolder:
    """Make the run folder of a job, or open it to resume.

    Args:
        identity: Further facts that must be as at the run's beginning.

    Raises:
        OptionError: The run in this folder began with other settings.
        StoreError: The folder cannot be used.
    """
    own = {
        "method": method,
        "seed": job.seed,
        "student": job.student,
        "student-tensors": _tensors(job),
        "num-classes": job.num_classes,
        "input-shape": job.input_shape,
        "normalization": [job.normalization.mean, job.normalization.std],
        "teacher": job.teacher if isinstance(job.teacher, str) else "method",
        **identity,
        "config": flatten(job.config),
    }
    folder = RunFolder.open_or_create(path, {**own, "threads": job.threads, **facts})
    try:
        _check_same_run(folder, own)
    except OptionError:
        folder.close()
        raise
    return folder


def stored_normalization(info: Mapping[str, Any]) -> Normalization:
    """Return the input space of a run's models, given its run.json."""
    mean, std = info["normalization"]
    return Normalization(tuple(mean), tuple(std))


def _tensors(job: Job) -> str:
    """Return the names, shapes and dtypes of the student's tensors in short: another model may have the same name."""
    signature = Signatures(job.builders)[job.student]
    digest = hashlib.sha256(repr(sorted(signature.items())).encode()).hexdigest()
    numbers = sum(math.prod(shape) for shape, _ in signature.values())
    return f"{len(signature)} tensors, {numbers} numbers, {digest[:16]}"


# The wait for clients and the quorum do not change the result that is computed from their answers.
WAITING = ("quorum", "patience-s", "ensemble-patience-s")


def _check_same_run(folder: RunFolder, asked: Mapping[str, Any]) -> None:
    """Refuse to resume a run that began as another one: its uploads, checkpoint and result would mix."""
    begun, now = folder.info, plain(asked)
    then = {**begun, **begun.get("config", {})}
    for key, value in {**now, **now["config"]}.items():
        if key not in ("config", *WAITING) and then.get(key, value) != value:
            raise OptionError(
                f"{key} is {value!r}, but the run in {folder.path} began with {then[key]!r}: "
                "resume with the same settings, or name another run_dir"
            )
