"""FedNova as a Flower strategy: updates are divided by the way that their steps went, before they are averaged.

Its clients report that way as the metric ``travel``, see :class:`strategies.client.corrections.Travel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import RecordDict

from ...core.bounds import MOST, bounded_step
from ...core.errors import UploadError
from ...rounds.rules import fednova_change, moved, plus
from ..messages import metrics_of
from .stepped import Arrays, SteppedFedAvg, models_of

# Far beyond every honest way, with a decayed rate too; and no product or quotient of two leaves double precision.
LEAST_TRAVEL, MOST_TRAVEL = 1e-30, 1e30


class FedNova(SteppedFedAvg):
    """Federated learning with normalised averaging; see :func:`strategies.rounds.rules.fednova_change`.

    Args:
        server_lr: The factor of the server's step.
        server_momentum: gamma in [0, 1]: the step of a round adds gamma times the step of the round before.
        **settings: Those of Flower's FedAvg.

    Attributes:
        velocity: The last step, float32, by parameter; None before the first and without momentum.
        bounded_divisor: The clients' changes are bounded per travel too, because the step sums changes per travel.
    """

    bounded_divisor = "travel"

    def __init__(self, *, server_lr: float = 1.0, server_momentum: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.velocity: Arrays | None = None
        self._server_lr, self._server_momentum = server_lr, server_momentum

    def check_answer(self, content: RecordDict) -> RecordDict:
        """Refuse an answer that does not tell how far its steps went.

        Raises:
            UploadError: ``travel`` is missing, not positive, or no possible way.
        """
        travel = metrics_of(content).get("travel")
        if not isinstance(travel, int | float) or not LEAST_TRAVEL <= travel <= MOST_TRAVEL:
            raise UploadError(
                f"metrics['travel'] is {str(travel)[:40]}: must be a positive number from {LEAST_TRAVEL:g} to "
                f"{MOST_TRAVEL:g}, the client's local steps times its learning rate"
            )
        return content

    def step(self, start: Arrays, answers: Sequence[RecordDict], *, num_clients: int) -> Arrays:  # noqa: ARG002
        """Return the next model; no ``travel`` makes the step longer than 5 median changes, times a rate above 1.

        Momentum adds to the bounded step, as in FedNova's released code: ``B <- gamma B + step``, ``x <- x + B``.
        """
        metrics = [metrics_of(content) for content in answers]
        ends = models_of(answers)
        change = fednova_change(
            start,
            ends,
            weights=[float(each[self.weighted_by_key]) for each in metrics],  # type: ignore[arg-type]
            travels=[float(each["travel"]) for each in metrics],  # type: ignore[arg-type]
            server_lr=self._server_lr,
        )
        # Bounded in double precision: a travel may make it longer than the model's numbers reach.
        model = plus(start, bounded_step(start, change, ends, MOST * max(1.0, self._server_lr)))
        if not self._server_momentum:
            return model
        step = {name: value.astype(np.float32) for name, value in moved(start, model).items()}
        self.velocity = plus(step, self.velocity, self._server_momentum) if self.velocity else step
        return plus(start, self.velocity)
