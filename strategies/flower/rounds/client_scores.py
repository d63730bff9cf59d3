"""Federated evaluation in rounds: the strategy under them asks clients for scores of the round's final model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.app import Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp.exception import AggregationError, InconsistentMessageReplies

from ...core.errors import QuorumError, one_line, printable
from ..evaluation import average_scores, scores_check
from ..run import log_info
from .base import Base
from .global_model import GlobalModel
from .round_trip import RoundTrip


class ClientScores:
    """Asks for scores as a strategy's ``configure_evaluate`` does; a failure costs the scores only.

    Attributes:
        found: Round -> scores, averaged by the strategy.
    """

    def __init__(self, base: Base, model: GlobalModel, config: Mapping[str, Any]) -> None:
        self.found: dict[int, MetricRecord] = {}
        self._base, self._model, self._config = base, model, config

    def ask(self, server_round: int, trip: RoundTrip) -> dict[str, float]:
        """Ask the clients that the strategy chooses, if it asks any.

        Args:
            server_round: From 1.

        Returns:
            The scores, with names that begin with ``clients_``; an empty dict if there are none.
        """
        if not self._base.evaluates or getattr(self._base.strategy, "fraction_evaluate", 1.0) == 0.0:
            return {}
        try:
            scores = self.average(server_round, self._ask(server_round, trip))
        except (AggregationError, InconsistentMessageReplies, QuorumError) as error:
            log(WARNING, "round %d: no scores of the clients: %s", server_round, one_line(str(error)))
            return {}
        if scores is None:
            return {}
        self.found[server_round] = scores
        numbers = {key: float(value) for key, value in scores.items() if isinstance(value, int | float)}
        values = {f"clients_{printable(key)}": value for key, value in numbers.items()}
        log_info(f"round {server_round}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        return values

    def average(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' scores as the strategy does; None without any, or if they cannot be averaged.

        Args:
            server_round: From 1.
        """
        try:
            return average_scores(self._base.strategy, server_round, replies)
        except (AggregationError, InconsistentMessageReplies) as error:
            log(WARNING, "round %d: no scores of the clients: %s", server_round, one_line(str(error)))
            return None

    def _ask(self, server_round: int, trip: RoundTrip) -> list[Message]:
        nodes = trip.connected()
        least = max(getattr(self._base.strategy, key, 1) for key in ("min_evaluate_nodes", "min_available_nodes"))
        if len(nodes) < least:
            raise QuorumError(f"{len(nodes)} clients are connected, the strategy waits for {least}")
        contents, kind = self._model.evaluation_requests(server_round, self._config, nodes)
        check = scores_check(self._base.strategy)
        return trip.evaluate(trip.free(contents), check, f"scores of round {server_round}", kind)
