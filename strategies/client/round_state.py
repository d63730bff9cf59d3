"""A client's state between the rounds of one run, on its own disk: a control variate, a drift, an error.

A client keeps one version per round that it took part in. ``last-round`` is the round of the client's last answer that
the server accepted, and the client continues from its state of that round. An answer that came too late for the server
so has no effect. The client also keeps its state of ``safe-round``, the round of the server's last checkpoint: a killed
server resumes there, and the resumed run ends with the same bits. At most three versions are kept, however seldom the
server writes a checkpoint or accepts an answer; a server that goes back adds one. Without either number the client
continues from its newest version of an earlier round, and keeps two.

Flower has a state of its own for every node, ``context.state``. It is lost with the Flower run, and a resumed run is a
new Flower run: its clients would start anew in the middle. The disk outlives it. A server that keeps no run sends no
run folder's id, and its clients keep no state.

A lost state cannot be restored: the client continues from zero, and reports it. The server's sum (SCAFFOLD's c,
FedDyn's mean h) still holds this client's earlier share, so the two halves differ by it from then on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..core.durable import atomic_write
from ..core.fingerprint import weights_sha256
from ..core.places import forget_older_runs, is_ours, make_run_place, run_place

State = dict[str, torch.Tensor]

# If the server sends no safe round: the last round, which it may repeat, and the one before.
VERSIONS_KEPT = 2
# Flower's own logger, so that the lines reach the log of the run.
LOG = getLogger("flwr")
# The key of a file's metadata that holds the digest of its tensors.
_DIGEST = "sha256"


@dataclass(frozen=True)
class Recalled:
    """A client's state at the start of a round.

    Attributes:
        round: The round of the state; 0 for none.
        state: By name; empty for none.
        restarted: The server counts on a state that the client has lost.
    """

    round: int = 0
    state: State = field(default_factory=dict)
    restarted: bool = False


@dataclass(frozen=True)
class RoundState:
    """One client's memory in one run.

    Attributes:
        folder: The run's folder, see :func:`strategies.core.places.run_place`; None to keep no state.
    """

    folder: Path | None
    client: str

    @classmethod
    def of(cls, state_dir: str, run_id: str, client: str) -> RoundState:
        """Return a client's memory; without a run's id, from a server that keeps no run, it keeps nothing.

        Raises:
            UploadError: The id is not that of a run folder.
        """
        return cls(run_place(state_dir, run_id) if run_id else None, client)

    def recall(self, server_round: int, last_round: int | None = None) -> Recalled:
        """Return the state that a round builds on, and warn if it should exist and does not.

        Args:
            server_round: The round, from 1.
            last_round: The round of this client's last answer that the server accepted, 0 for none. None if the server
                does not send it: the newest state then counts, and a lost one cannot be noticed for certain.
        """
        if last_round is None:
            known, state = self.before(server_round)
            if not known and server_round > 1:
                LOG.warning("%s: no state of earlier rounds is kept here: it continues from zero", self.client)
            return Recalled(known, state)
        found = self._load(last_round) if last_round else {}
        if found is None:
            LOG.warning("%s: its state of round %d is not kept here: it continues from zero", self.client, last_round)
            return Recalled(restarted=True)
        return Recalled(last_round, found)

    def before(self, server_round: int) -> tuple[int, State]:
        """Return the newest round before a round that has a state, and the state; 0 and an empty state for none."""
        for known in sorted(self._rounds(), reverse=True):
            if known < server_round and (state := self._load(known)) is not None:
                return known, state
        return 0, {}

    def save(
        self, server_round: int, state: State, safe_round: int | None = None, *, last_round: int | None = None
    ) -> None:
        """Write the state after a round, and remove old ones; a disk that refuses only causes a warning.

        Args:
            safe_round: The oldest round whose state the server may still need; None if the server does not send it.
            last_round: The newest before this one that it may need, and none in between; None if it does not send it.
        """
        if self.folder is None:
            return
        try:
            make_run_place(self.folder)
            tensors = {key: value.contiguous() for key, value in state.items()}
            atomic_write(self._file(server_round), save(tensors, {_DIGEST: weights_sha256(tensors)}))
            # A request that comes late after others does not remove the newest.
            rounds = sorted(self._rounds())
            newest = rounds[-VERSIONS_KEPT if None in (safe_round, last_round) else -1 :]
            for each in {*rounds} - {safe_round, last_round, server_round, *newest} if is_ours(self.folder) else ():
                self._file(each).unlink(missing_ok=True)
            forget_older_runs(self.folder)
        except (OSError, SafetensorError) as error:  # the trained weights matter more than the memory
            LOG.warning("%s: its state of round %d is not saved: %s", self.client, server_round, error)

    def _load(self, known: int) -> State | None:
        if self.folder is None:
            return None
        try:
            return _read(self._file(known)) if self._file(known).exists() else None
        except (OSError, ValueError, SafetensorError) as error:
            LOG.warning(
                "%s: its state of round %d cannot be read from %s: %s", self.client, known, self._file(known), error
            )
            return None

    def _rounds(self) -> list[int]:
        try:
            names = [path.name for path in self.folder.iterdir()] if self.folder else []
        except OSError:  # there is none yet, or it is closed to this user
            names = []
        pattern = re.compile(rf"{re.escape(self.client)}-state-(\d+)\.safetensors")
        return [int(found[1]) for name in names if (found := pattern.fullmatch(name))]

    def _file(self, server_round: int) -> Path:
        return (self.folder or Path()) / f"{self.client}-state-{server_round}.safetensors"


def _read(path: Path) -> State:
    """Read a state, and compare it with its digest."""
    with safe_open(path, framework="pt") as file:
        wanted = (file.metadata() or {}).get(_DIGEST)
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    if weights_sha256(state) != wanted:
        raise ValueError(f"{path}: its digest differs from that of its content")
    return state
