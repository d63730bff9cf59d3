"""What a client remembers from round to round of one run, on its own disk: a control variate, an error fed back.

Two versions are kept. A server that was killed asks for its last round again; the client then answers from the state
that it had before that round, as if it had not been asked, so that the resumed run ends with the same bits.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .places import forget_old_runs, run_place

State = dict[str, torch.Tensor]

VERSIONS_KEPT = 2
# Flower's own logger, so that its lines reach the log of the run.
LOG = getLogger("flwr")


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

    def before(self, server_round: int) -> tuple[int, State]:
        """Return the round of the newest state from before a round, with the state; 0 and nothing if there is none."""
        for known in sorted(self._rounds(), reverse=True):
            if known < server_round:
                try:
                    return known, load_file(self._file(known))
                except (OSError, SafetensorError) as error:
                    LOG.warning("%s: its state of round %d cannot be read: %s", self.client, known, error)
        return 0, {}

    def save(self, server_round: int, state: State) -> None:
        """Write the state after a round, and remove what is too old; a disk that refuses is a warning."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self._file(server_round).with_suffix(f".{os.getpid()}.tmp")
            save_file({key: value.contiguous() for key, value in state.items()}, temporary)
            temporary.replace(self._file(server_round))
            for old in sorted(self._rounds())[:-VERSIONS_KEPT]:
                self._file(old).unlink(missing_ok=True)
            forget_old_runs(self.folder.parent)
        except (OSError, SafetensorError) as error:  # what is trained is worth more than its memory
            LOG.warning("%s: its state of round %d is not kept: %s", self.client, server_round, error)

    def _rounds(self) -> list[int]:
        names = (path.name for path in self.folder.iterdir()) if self.folder and self.folder.is_dir() else ()
        pattern = re.compile(rf"{re.escape(self.client)}-state-(\d+)\.safetensors")
        return [int(found[1]) for name in names if (found := pattern.fullmatch(name))]

    def _file(self, server_round: int) -> Path:
        return (self.folder or Path()) / f"{self.client}-state-{server_round}.safetensors"
