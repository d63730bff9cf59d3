"""Scores of the resulting student from the clients' own data."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg

from ..core.errors import UploadError
from ..run.traffic import Traffic
from .asking import Exchange, to_each
from .nodes import Nodes, Refusals, Sent, own_error

POLL_S = 0.1


@dataclass(frozen=True)
class ClientEvaluation:
    """Flower's own federated evaluation, with a limited wait; a failure costs the scores only.

    Attributes:
        fraction: Share of the connected nodes to ask, in (0, 1].
    """

    fraction: float

    def configure(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask a share of the nodes to evaluate ``arrays``, as Flower's FedAvg does; it waits forever for a node."""
        return list(self._fedavg().configure_evaluate(server_round, arrays, config, grid))

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' scores by their examples, as Flower's FedAvg does; None if they do not fit together."""
        try:
            return self._fedavg().aggregate_evaluate(server_round, replies)
        except InconsistentMessageReplies as error:
            log(WARNING, "the clients' scores cannot be averaged: %s", error)
            return None

    def run(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord, timeout: float
    ) -> MetricRecord | None:
        """Ask, wait at most ``timeout`` seconds for nodes and as long for answers, and average."""
        deadline = time.monotonic() + timeout
        while not list(grid.get_node_ids()):
            if time.monotonic() >= deadline:
                log(WARNING, "no client connected within %.0f s to evaluate the student", timeout)
                return None
            time.sleep(POLL_S)
        messages = self.configure(server_round, arrays, config, grid)
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        replies: list[Message] = []

        def receive(reply: Message, sent: Sent) -> bool:  # noqa: ARG001
            if reply.has_error():
                raise UploadError(f"scores: {own_error(reply)}")
            replies.append(reply)
            return True

        nodes, question = Nodes(grid, Refusals(None), Traffic()), to_each(contents, MessageType.EVALUATE)
        exchange = Exchange(nodes, "evaluation", question=question, receive=receive)
        exchange.wait(timeout, lambda: not exchange.waiting_for, lambda: f"scores: {len(replies)} here")
        return self.aggregate(server_round, replies)

    def _fedavg(self) -> FedAvg:
        # Made on demand: Flower warns about every fraction that is 0.
        return FedAvg(fraction_train=0.0, fraction_evaluate=self.fraction, min_evaluate_nodes=1, min_available_nodes=1)
