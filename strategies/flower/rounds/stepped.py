"""FedAvg with another step: the common part of SCAFFOLD, FedDyn and FedNova as Flower strategies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ..messages import arrays_name
from .round_records import answers_of, to_numpy, to_record

Arrays = dict[str, np.ndarray[Any, Any]]


class SteppedFedAvg(FedAvg):
    """FedAvg whose next model is a step from the start of the round.

    Args:
        **settings: Those of Flower's FedAvg.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._start: Arrays = {}
        self._num_clients = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as FedAvg does, and keep the start of the round; the optional ``num-clients`` of the config is N."""
        self._start = to_numpy(arrays)
        self._num_clients = int(config.get("num-clients", 0))  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002  Flower's signature
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model and the clients' metrics; (None, None) without an answer."""
        answers = answers_of(replies)
        if not answers:
            return None, None
        model = self.step(self._start, answers, num_clients=max(self._num_clients, len(answers)))
        return to_record(model), self.train_metrics_aggr_fn(answers, self.weighted_by_key)

    @abstractmethod
    def step(self, start: Arrays, answers: Sequence[RecordDict], *, num_clients: int) -> Arrays:
        """Return the next model, and move the server's state.

        Args:
            start: The model that the clients started from.
            answers: The clients' answers, at least one; see :func:`models_of`.
            num_clients: N, the clients of the federation.
        """


def models_of(answers: Sequence[RecordDict]) -> list[Arrays]:
    """Return the models of the answers.

    Raises:
        UploadError: An answer has no array record, or several without one named ``arrays``.
    """
    return [to_numpy(content[arrays_name(content)]) for content in answers]


def zeros_like(arrays: ArrayRecord) -> Arrays:
    """Return zeros in the shapes of a model's parameters, by name."""
    return {name: np.zeros_like(value) for name, value in to_numpy(arrays).items()}
