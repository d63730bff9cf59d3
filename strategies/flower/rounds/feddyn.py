"""FedDyn as a Flower strategy: a client's next steps take back the drift of its models so far.

A request sends alpha as ``feddyn-alpha``; an answer is the client's model alone, because the server follows the mean of
the clients' drifts by itself. The clients' half is :class:`strategies.client.corrections.DynamicRegularizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ...rounds.rules import feddyn_step
from .stepped import Arrays, SteppedFedAvg, models_of, zeros_like


class FedDyn(SteppedFedAvg):
    """Federated learning with dynamic regularisation; see :func:`strategies.rounds.rules.feddyn_step`.

    The next model is the start of the clients' next round: the plain mean of their models, moved by the mean drift. It
    is also the result; published code of FedFTG tests the plain mean.

    Args:
        alpha: The weight of the clients' term, above 0; one for all clients.
        **settings: Those of Flower's FedAvg.

    Attributes:
        mean_drift: The mean of all clients' h_k, by name of parameter; empty before the first round, as if all were 0.
        clients_remember: The clients keep their h_k from round to round.
        equal_buffers: Buffers are averaged like the models, with equal weights.
    """

    clients_remember = True
    equal_buffers = True

    def __init__(self, *, alpha: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.mean_drift: Arrays = {}
        self._alpha = alpha

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as FedAvg does, and send alpha; the optional ``num-clients`` of the config is N."""
        self.mean_drift = self.mean_drift or zeros_like(arrays)
        config["feddyn-alpha"] = self._alpha
        return super().configure_train(server_round, arrays, config, grid)

    def step(self, start: Arrays, answers: Sequence[RecordDict], *, num_clients: int) -> Arrays:
        """Return the next model, and move the mean drift."""
        model, self.mean_drift = feddyn_step(start, models_of(answers), drift=self.mean_drift, num_clients=num_clients)
        return model
