"""The trained model on a client's own disk, so that it never trains twice for one run.

Trained weights are written before they are sent. If the upload is lost, or a killed server asks again, the client sends
the kept weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from strategies.core.durable import atomic_write, read_json, sha256_file, with_digest
from strategies.core.errors import StoreError
from strategies.core.facts import UploadFacts
from strategies.core.places import check_round, forget_older_runs, is_ours, make_run_place, newest_first, run_place
from strategies.core.scan import LOG

# A client's newest models of one run, since the server names the rounds. FuseFL asks again for at most four of them.
MODELS_KEPT = 8
# The key of the facts that holds the digest of the weights.
_WEIGHTS = "weights-sha256"
# Facts that are NaN where a training does not measure them, or diverges.
_MEASURED = ("loss", "accuracy")


@dataclass(frozen=True)
class Trained:
    """A finished local training, or a pretrained model.

    Attributes:
        facts: The facts of its upload, with all label counts, whatever part of them the client reports.
        loss: Mean training loss of the last epoch; NaN if it was not measured.
        accuracy: Training accuracy of the last epoch, in [0, 1]; NaN if it was not measured.
        epsilon: Privacy budget spent; None without differential privacy.
        reported: What a training of the user's own reports, by name.
    """

    facts: UploadFacts
    loss: float = math.nan
    accuracy: float = math.nan
    epsilon: float | None = None
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The measured numbers, as the client reports them beside the number of examples."""
        known = {"train-loss": self.loss, "train-accuracy": self.accuracy, "epsilon": self.epsilon}
        known |= {f"train-{name}": value for name, value in self.reported.items()}
        return {key: value for key, value in known.items() if value is not None and not math.isnan(value)}


class KeptModel:
    """One client's files for one round of one run.

    Args:
        state_dir: The client's folder; empty: ``$ONESHOT_CLIENT_STATE``, else one in the user's cache.
        run_id: The run folder's id, as the server sends it.
        server_round: The round, from 1.

    Raises:
        UploadError: The id is not the id of a run folder, or the round is below 1.
    """

    def __init__(self, state_dir: str, run_id: str, client: str, server_round: int) -> None:
        check_round(server_round)
        self._client, self._folder = client, run_place(state_dir, run_id)
        self._weights = self._folder / f"{client}-{server_round}.safetensors"
        self._facts = self._weights.with_suffix(".json")

    @property
    def finished(self) -> bool:
        """Whether a model was kept, and perhaps sent, even if it cannot be read now; a closed folder may hold one."""
        try:
            return self._facts.exists()
        except OSError:
            return True

    def load(self) -> tuple[Trained, dict[str, torch.Tensor]] | None:
        """Return the model trained for this round; None if it is missing, or unreadable, a warning."""
        if not self.finished:
            return None
        try:
            row = read_json(self._facts)
            if sha256_file(self._weights) != row.pop(_WEIGHTS):
                raise ValueError("its digest differs from that of its content")
            loss, accuracy = (math.nan if (value := row.pop(key)) is None else value for key in _MEASURED)
            epsilon, reported = row.pop("epsilon"), row.pop("reported", {})
            return Trained(UploadFacts.from_row(row), loss, accuracy, epsilon, reported), load_file(self._weights)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError, StoreError) as error:
            LOG.warning("the kept model %s cannot be read: %s", self._weights, error)
            return None

    def save(self, trained: Trained, state: dict[str, torch.Tensor]) -> None:
        """Write the weights, then the facts with the digest of both; a model counts as kept once both are on the disk.

        All but the newest models of the client in this run are removed.

        Raises:
            OSError: A file cannot be written.
        """
        make_run_place(self._folder)
        # Copies, because safetensors writes no tensors that share their memory, as tied weights do.
        data = save({key: value.clone(memory_format=torch.contiguous_format) for key, value in state.items()})
        measured = {key: getattr(trained, key) for key in _MEASURED}
        measured |= {key: None for key in _MEASURED if not math.isfinite(measured[key])}  # JSON has no NaN or infinity
        row = {**trained.facts.as_row(), **measured, "epsilon": trained.epsilon, "reported": dict(trained.reported)}
        atomic_write(self._weights, data)
        atomic_write(self._facts, json.dumps(with_digest({**row, _WEIGHTS: hashlib.sha256(data).hexdigest()})).encode())
        pattern = re.compile(rf"{re.escape(self._client)}-\d+\.safetensors")
        others = [path for path in self._folder.iterdir() if pattern.fullmatch(path.name) and path != self._weights]
        for path in newest_first(others)[MODELS_KEPT - 1 :] if is_ours(self._folder) else ():
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        forget_older_runs(self._folder)
