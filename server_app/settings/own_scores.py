"""Accuracies by a function of the user's own, for runs of another project, whose held-out data only it knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_app.project import FAILURES, function_of, one_line
from server_app.settings.held_out import HeldOut
from strategies.core.errors import OptionError
from strategies.teacher.ensemble import Ensemble


@dataclass(frozen=True)
class OwnScores:
    """A user's function in the place of :class:`.held_out.HeldOut`.

    Attributes:
        name: ``module:attribute``.
        function: Takes a module in eval mode, from a batch of the project's own inputs to logits, and returns its
            accuracy in %, or a dict that has it under ``"accuracy"``.
        passed: Called after each call with the number of models that it has seen; None for no call.
    """

    name: str
    function: Callable[[nn.Module], Any]
    passed: Callable[[int], None] | None = None
    num_batches = 1
    member_passes = 2  # alone and in the ensemble
    classes = ()  # which only the project knows

    @classmethod
    def of(cls, name: str) -> OwnScores:
        """Import the function.

        Raises:
            OptionError: It cannot be imported, or is none.
        """
        return cls(name, function_of(name, "--evaluate"))

    def __call__(self, epoch: int, model: nn.Module) -> dict[str, float]:  # noqa: ARG002  an Observer gets both
        """Return ``{"accuracy": %}`` of a model: the observer of a server stage."""
        return {"accuracy": self.accuracy(model)}

    def accuracy(self, model: nn.Module) -> float:
        """Return the function's accuracy of a model, in %; the model's mode is restored.

        Raises:
            OptionError: The function fails, or returns no number from 0 to 100.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                found = self.function(model)
        except FAILURES as error:
            raise OptionError(f"--evaluate {self.name!r} fails: {one_line(error)}") from error
        finally:
            model.train(was_training)
        value = found.get("accuracy") if isinstance(found, Mapping) else found
        try:
            score = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            score = math.nan
        if not 0 <= score <= 100:
            raise OptionError(
                f"--evaluate {self.name!r} returns {str(found)[:80]}: must return the accuracy in %, 0 to 100, or a "
                "dict that has it under 'accuracy'"
            )
        if self.passed is not None:
            self.passed(len(model.members) if isinstance(model, Ensemble) else 1)
        return round(score, 2)

    def member_accuracies(self, ensemble: Ensemble) -> tuple[list[float], float]:
        """Return every member's accuracy and the ensemble's, in %."""
        members = ensemble.members
        alone = [self.accuracy(member) for member in members] if isinstance(members, nn.ModuleList) else []
        return alone, self.accuracy(ensemble)


Scorer = HeldOut | OwnScores
