"""The trained model on a client's own disk, so that it never trains twice for one run.

Trained weights are written before they are sent. If the upload is lost, or a killed server asks again, the client sends
the kept weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from strategies.client.places import forget_old_runs, make_run_place, run_place


@dataclass(frozen=True)
class Trained:
    """A finished local training.

    Attributes:
        architecture: Its key in the zoo.
        num_examples: Training examples.
        label_counts: Examples per class [C].
        loss: Mean training loss of the last epoch.
        accuracy: Training accuracy of the last epoch, in [0, 1].
        ranges: Layer -> smallest and largest activation on its training examples; None if the server did not ask.
        epsilon: Privacy budget spent; None without differential privacy.
    """

    architecture: str
    num_examples: int
    label_counts: tuple[int, ...]
    loss: float
    accuracy: float
    ranges: Mapping[str, tuple[float, float]] | None = None
    epsilon: float | None = None


class Keep:
    """One client's files for one round of one run.

    Args:
        state_dir: The client's folder; empty: ``$ONESHOT_CLIENT_STATE``, else one in the user's cache.
        run_id: The run folder's id, as the server sends it.
        client: The client's name.
        server_round: The round, from 1.

    Raises:
        UploadError: The id is not the id of a run folder.
    """

    def __init__(self, state_dir: str, run_id: str, client: str, server_round: int) -> None:
        self._folder = run_place(state_dir, run_id)
        self._weights = self._folder / f"{client}-{server_round}.safetensors"
        self._facts = self._weights.with_suffix(".json")

    @property
    def finished(self) -> bool:
        """Whether a model was kept, and perhaps sent, even if its file is damaged now."""
        return self._facts.exists()

    def load(self) -> tuple[Trained, dict[str, torch.Tensor]] | None:
        """Return the model trained for this round; None if it is missing or damaged."""
        try:
            facts = json.loads(self._facts.read_text())
            facts["label_counts"] = tuple(facts["label_counts"])
            if facts.get("ranges") is not None:
                facts["ranges"] = {layer: (low, high) for layer, (low, high) in facts["ranges"].items()}
            return Trained(**facts), load_file(self._weights)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, SafetensorError):
            return None

    def save(self, trained: Trained, state: dict[str, torch.Tensor]) -> None:
        """Write the weights, then the facts; a model counts as kept once both exist.

        Raises:
            OSError: A file cannot be written.
        """
        make_run_place(self._folder)
        temporary = self._weights.with_suffix(f".{os.getpid()}.tmp")
        save_file({key: value.contiguous() for key, value in state.items()}, temporary)
        temporary.replace(self._weights)
        temporary.write_text(json.dumps(asdict(trained)))
        temporary.replace(self._facts)
        forget_old_runs(self._folder.parent)
