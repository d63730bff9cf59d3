"""The last layer of a stage's result, made anew: by the clients' examples of each class, or from their sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import OptionError
from ..core.stage_options import NONE, RIDGE
from ..teacher.last_layer import average_rows, body_of, solve_layer
from ..teacher.weight_space import has_adapters
from ..uploads.tensors import weights_sha256
from .files import read_equal_weights, read_json, save_weights, write_json

if TYPE_CHECKING:
    from ..method import Job, Outcome
    from ..method import State as Weights

SUMS_FILE, SUMS_FACTS = "head-sums.safetensors", "head-sums.json"
Sums = Mapping[str, "Weights"]


@dataclass(frozen=True)
class Finish:
    """What a server stage does with the last layer of its result.

    Attributes:
        how: A value of the option ``finish``.
        folder: Of the round whose clients' sums are stored, or will be.
        ask: Returns the clients' sums of the last layer's inputs in a model; None where no client is in reach.
    """

    how: str
    folder: Path
    ask: Callable[[Job, Weights], Sums] | None = None

    def __call__(self, job: Job, outcome: Outcome) -> Outcome:
        """Return the outcome with its last layer made anew.

        Raises:
            OptionError: The result is no model of the student's architecture, a client reports no label counts, or the
                stored sums are those of another model and no client is in reach.
            QuorumError: Too few clients answer.
        """
        if self.how == NONE:
            return outcome
        student = outcome.student
        if student is None or has_adapters(job):
            found = "an ensemble" if student is None else "an adapter"
            raise OptionError(f"setting 'finish' is {self.how!r}: must be {NONE!r} for a result that is {found}")
        if self.how == RIDGE:
            return replace(outcome, student=solve_layer(job, student, self._sums(job, student)))
        return replace(outcome, student=average_rows(job, student))

    def _sums(self, job: Job, student: Weights) -> Sums:
        """Return the clients' sums, stored if they are of these weights, else asked for and stored."""
        body, facts = weights_sha256(body_of(job, student)), self.folder / SUMS_FACTS
        if facts.exists() and (stored := read_json(facts))["body-sha256"] == body:
            sums = read_equal_weights(self.folder / SUMS_FILE, str(stored["sums-sha256"]))
            return {name: {key: sums[f"{name}/{key}"] for key in stored["arrays"]} for name in stored["clients"]}
        if self.ask is None:
            raise OptionError(
                f"setting 'finish' is {RIDGE!r}: needs the clients' sums over the features of this result, which "
                f"{self.folder} does not hold: must be 'none' or 'counts' in a replay that ends with other weights"
            )
        found = self.ask(job, student)
        flat = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
        save_weights(self.folder / SUMS_FILE, flat)
        arrays = sorted(next(iter(found.values())))
        write_json(
            facts,
            {"body-sha256": body, "sums-sha256": weights_sha256(flat), "clients": sorted(found), "arrays": arrays},
        )
        return found
