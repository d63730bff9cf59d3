"""The logits of an ensemble on a client's own examples: computed once, cached on its disk. Needs numpy only."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core import refusals
from ..core.durable import MIB, atomic_write
from ..core.places import forget_older_runs, is_ours, make_private, make_run_place, newest_first, run_place
from . import TORN

# The newest ensembles of a run whose logits a client keeps.
ENSEMBLES_KEPT = 4

# The largest logits, votes or hidden units of an ensemble on a client without a limit of its own, MiB.
MADE_MIB = 1024.0

# Flower's own logger, so that the lines reach the log of the run.
LOG = getLogger("flwr")

# A simulated client's process serves many clients and many rounds: it reads a recent file only once.
_RECENT: OrderedDict[tuple[str, int], Logits] = OrderedDict()
_RECENT_BYTES = 2**28


@dataclass(frozen=True)
class Logits:
    """An ensemble's logits on one client's held examples.

    Attributes:
        members: Digest of each member [M].
        values: float32 [M, n, C].
        labels: int64 [n].
        inputs: The members' inputs, normalised, float32 [n, ...]; empty [0] if the aggregator does not read them.
    """

    members: tuple[str, ...]
    values: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    inputs: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + self.labels.nbytes + self.inputs.nbytes

    def of(self, members: Sequence[str]) -> Logits:
        """Return the logits of some of the members, in their order; a repeated member takes memory each time."""
        rows = [self.members.index(member) for member in members]
        return Logits(tuple(members), self.values[rows], self.labels, self.inputs)


def check_made(what: str, size: int, most_mib: float) -> None:
    """Refuse what a client would make of an ensemble, before any of it takes memory or disk.

    The limit on messages does not bound the logits. The name of a member has 64 bytes, its logits have 4 n C.

    Args:
        size: Its bytes.
        most_mib: The largest ensemble that the client accepts, MiB; 0: :data:`MADE_MIB`.

    Raises:
        UploadError: It is larger.
    """
    most = most_mib or MADE_MIB
    if size > most * MIB:
        raise refusals.beyond_limit(f"the ensemble's {what} are", size / MIB, most)


class LogitCache:
    """The files of one client and one run."""

    def __init__(self, state_dir: str, run_id: str, client: str, held: str = "") -> None:
        self._run, self._name = run_place(state_dir, run_id), f"{client}-ensembles-"
        self._folder = self._run / f"{self._name}{hashlib.sha256(held.encode()).hexdigest()[:8]}"

    def load(self, ensemble: str) -> Logits | None:
        """Return the logits of the ensemble with this digest; None if they are missing or their file is torn."""
        path = self._path(ensemble)
        try:
            key = (str(path), path.stat().st_mtime_ns)
        except OSError:
            return None
        if key in _RECENT:
            return _RECENT[key]
        found = _read(path)
        if found is not None:
            _remember(key, found)
        return found

    def known(self, members: Sequence[str]) -> Logits | None:
        """Return the logits of the newest cached ensemble that holds all of ``members``; see :meth:`Logits.of`."""
        for path in newest_first(self._folder.glob("*.npz")):
            kept = _read(path)
            if kept is not None and set(members) <= set(kept.members):
                return kept
        return None

    def save(self, ensemble: str, logits: Logits) -> None:
        """Write the logits of an ensemble, and remove all but the newest others, whatever settings these are of.

        Raises:
            OSError: The disk refuses the file.
        """
        make_run_place(self._run)
        make_private(self._folder)
        file, members = io.BytesIO(), np.array(logits.members, dtype=np.str_)
        arrays = {"members": members, "values": logits.values, "labels": logits.labels, "inputs": logits.inputs}
        np.savez(file, allow_pickle=False, digest=np.array(_digest_of(arrays)), **arrays)
        atomic_write(self._path(ensemble), file.getbuffer())
        for old in newest_first(self._of_run())[ENSEMBLES_KEPT:] if is_ours(self._run) else ():
            old.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds others
                old.parent.rmdir()
        os.utime(self._run)  # its time decides which run is the oldest
        forget_older_runs(self._run)

    def forget_others(self, ensemble: str) -> None:
        """Remove this run's logits of every other ensemble, because one of its members has to be forgotten."""
        for path in self._of_run() if is_ours(self._run) else ():
            if path != self._path(ensemble):
                path.unlink(missing_ok=True)

    def _path(self, ensemble: str) -> Path:
        return self._folder / f"{ensemble}.npz"

    def _of_run(self) -> Iterator[Path]:
        return self._run.glob(f"{self._name}*/*.npz")


def _read(path: Path) -> Logits | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("members", "values", "labels", "inputs")}
            digest = str(file["digest"])
    except TORN as error:
        LOG.warning("the logits %s are damaged: %s", path, error)
        return None
    if digest != _digest_of(arrays):
        LOG.warning("the logits %s are damaged: their digest differs from that of their content", path)
        return None
    members = tuple(str(member) for member in arrays["members"])
    return Logits(members, arrays["values"], arrays["labels"], arrays["inputs"])


def _digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name}/{array.dtype.str}/{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def _remember(key: tuple[str, int], logits: Logits) -> None:
    _RECENT[key] = logits
    while (
        len(_RECENT) > 1 and sum(each.values.nbytes + each.inputs.nbytes for each in _RECENT.values()) > _RECENT_BYTES
    ):
        _RECENT.popitem(last=False)
