"""What a client remembers from round to round of one run, on its own disk: a control variate, a drift, an error.

A version is kept per round that the client was in. The server says by which of its rounds it counts the client's
answers, ``last-round``, and its state of that round is taken, whatever else lies here: an answer that came too late for
the server is as if it had not been given. Kept beside it and the new one is that of ``safe-round``, the same as of the
server's last checkpoint. A server that was killed goes on from there, and the client with it, so that the resumed run
ends with the same bits. That is three versions at most, however seldom the server writes a checkpoint. Of a server that
says neither, the newest version from before the round is taken, and two are kept.

Flower has a state of its own for every node, ``context.state``. It is lost with the Flower run, and a run that is
resumed is a new one to Flower: its clients would begin anew in the middle of it. Hence the disk. Without a run folder's
id, as of a server that keeps no run, nothing is remembered.

A state that is lost is not restored by anyone: the client goes on from zero, and says so. What the server has added up
of it (SCAFFOLD's c, FedDyn's mean h) stays in the server's sum, so that the two halves differ by this client's share
from then on.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .places import forget_old_runs, make_private, run_place

State = dict[str, torch.Tensor]

# Where the server says nothing of what it goes back to: the last round, which may be asked again, and the one before.
VERSIONS_KEPT = 2
# Flower's own logger, so that its lines reach the log of the run.
LOG = getLogger("flwr")


@dataclass(frozen=True)
class Recalled:
    """What a client remembers when a round begins.

    Attributes:
        round: Of the state; 0 for none.
        state: By name; empty for none.
        restarted: The server counts on a state that is not here.
    """

    round: int = 0
    state: State = field(default_factory=dict)
    restarted: bool = False


@dataclass(frozen=True)
class RoundState:
    """One client's memory in one run.

    Attributes:
        folder: Of the run, see :func:`strategies.client.places.run_place`; None to remember nothing.
        client: The client's name.
    """

    folder: Path | None
    client: str

    @classmethod
    def of(cls, state_dir: str, run_id: str, client: str) -> RoundState:
        """Return a client's memory; without a run's id, as of a server that keeps no run, it remembers nothing.

        Raises:
            UploadError: The id is none of a run folder.
        """
        return cls(run_place(state_dir, run_id) if run_id else None, client)

    def recall(self, server_round: int, last_round: int | None = None) -> Recalled:
        """Return the state that a round builds on; one that should be here and is not is a warning.

        Args:
            server_round: The round, from 1.
            last_round: That of this client's last answer that the server has accepted, 0 for none; None if the server
                does not tell: then it is the newest state, and whether one is lost nobody can say for sure.
        """
        if last_round is None:
            known, state = self.before(server_round)
            if not known and server_round > 1:
                LOG.warning("%s: nothing of earlier rounds is kept here: it goes on from zero", self.client)
            return Recalled(known, state)
        found = self._load(last_round) if last_round else {}
        if found is None:
            LOG.warning("%s: its state of round %d is not kept here: it goes on from zero", self.client, last_round)
            return Recalled(restarted=True)
        return Recalled(last_round, found)

    def before(self, server_round: int) -> tuple[int, State]:
        """Return the round of the newest state from before a round, with the state; 0 and nothing if there is none."""
        for known in sorted(self._rounds(), reverse=True):
            if known < server_round and (state := self._load(known)) is not None:
                return known, state
        return 0, {}

    def save(
        self, server_round: int, state: State, safe_round: int | None = None, *, last_round: int | None = None
    ) -> None:
        """Write the state after a round, and remove what is too old; a disk that refuses is a warning.

        Args:
            server_round: The round.
            state: By name.
            safe_round: The oldest round whose state the server may still ask for; None if it does not tell.
            last_round: The newest before this one. The server asks for none between the two; None if it does not tell.
        """
        if self.folder is None:
            return
        try:
            make_private(self.folder)
            temporary = self._file(server_round).with_suffix(f".{os.getpid()}.tmp")
            save_file({key: value.contiguous() for key, value in state.items()}, temporary)
            temporary.replace(self._file(server_round))
            rounds = sorted(self._rounds())
            for each in _old(rounds, safe_round, last_round):
                self._file(each).unlink(missing_ok=True)
            forget_old_runs(self.folder.parent)
        except (OSError, SafetensorError) as error:  # what is trained is worth more than its memory
            LOG.warning("%s: its state of round %d is not kept: %s", self.client, server_round, error)

    def _load(self, known: int) -> State | None:
        if self.folder is None or not self._file(known).exists():
            return None
        try:
            return load_file(self._file(known))
        except (OSError, SafetensorError) as error:
            LOG.warning("%s: its state of round %d cannot be read: %s", self.client, known, error)
            return None

    def _rounds(self) -> list[int]:
        names = (path.name for path in self.folder.iterdir()) if self.folder and self.folder.is_dir() else ()
        pattern = re.compile(rf"{re.escape(self.client)}-state-(\d+)\.safetensors")
        return [int(found[1]) for name in names if (found := pattern.fullmatch(name))]

    def _file(self, server_round: int) -> Path:
        return (self.folder or Path()) / f"{self.client}-state-{server_round}.safetensors"


def _old(rounds: list[int], safe: int | None, last: int | None) -> list[int]:
    """Return those of the ascending rounds whose states nobody will ask for."""
    if safe is None:
        return rounds[:-VERSIONS_KEPT]
    return [each for each in rounds if each < safe or (last is not None and safe < each < last)]
