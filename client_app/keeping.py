"""What a client keeps on its own disk, so that it never trains twice for one run.

Trained weights are written before they are sent. If the upload is lost on its way, or the server was killed and asks
again, the client sends what it has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from strategies.errors import UploadError

# A client's disk is not the server's archive: the newest runs are kept.
RUNS_KEPT = 16

# The ids that run folders have. Nothing else is made, or removed, in a folder that may be the user's own.
RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Trained:
    """A finished local training.

    Attributes:
        architecture: Its key in the zoo.
        num_examples: Training examples.
        label_counts: Examples per class [C].
        loss: Mean training loss of the last epoch.
        accuracy: Training accuracy of the last epoch, in [0, 1].
    """

    architecture: str
    num_examples: int
    label_counts: tuple[int, ...]
    loss: float
    accuracy: float


class Keep:
    """One client's place on its disk for one round of one run.

    Args:
        state_dir: The client's folder; empty: ``$ONESHOT_CLIENT_STATE``, else one in the user's cache.
        run_id: The run folder's id, as the server sends it.
        client: The client's name.
        server_round: The round, from 1.

    Raises:
        UploadError: The id is none of a run folder.
    """

    def __init__(self, state_dir: str, run_id: str, client: str, server_round: int) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise UploadError(f"the server's run-id is {run_id[:80]!r}: allowed are 32 hexadecimal digits")
        place = state_dir or os.environ.get("ONESHOT_CLIENT_STATE", "") or "~/.cache/oneshot-fl/clients"
        self._root = Path(place).expanduser()
        self._folder = self._root / run_id
        self._weights = self._folder / f"{client}-{server_round}.safetensors"
        self._facts = self._weights.with_suffix(".json")

    def load(self) -> tuple[Trained, dict[str, torch.Tensor]] | None:
        """Return what was trained for this round, or None; a torn file counts as nothing."""
        try:
            facts = json.loads(self._facts.read_text())
            facts["label_counts"] = tuple(facts["label_counts"])
            return Trained(**facts), load_file(self._weights)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError):
            return None

    def save(self, trained: Trained, state: dict[str, torch.Tensor]) -> None:
        """Write the weights, then the facts: only both together count.

        Raises:
            OSError: The disk refuses.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._weights.with_suffix(f".{os.getpid()}.tmp")
        save_file({key: value.contiguous() for key, value in state.items()}, temporary)
        temporary.replace(self._weights)
        temporary.write_text(json.dumps(asdict(trained)))
        temporary.replace(self._facts)
        self._forget_old_runs()

    def _forget_old_runs(self) -> None:
        # A folder's time is that of its newest file.
        runs = sorted((path for path in self._root.iterdir() if RUN_ID.fullmatch(path.name)), key=_last_used)
        for path in runs[:-RUNS_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another client of this machine has just removed it
        return 0.0
