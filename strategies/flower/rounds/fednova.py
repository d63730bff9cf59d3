"""FedNova as a Flower strategy: updates are divided by the way that their steps went, before they are averaged.

Its clients report that way as the metric ``travel``, see :class:`strategies.client.corrections.Travel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ...core.errors import UploadError
from ...rounds.rules import fednova_step
from .round_records import answers_of, to_numpy, to_record


class FedNova(FedAvg):
    """Federated learning with normalised averaging; see :func:`strategies.rounds.rules.fednova_step`.

    Args:
        server_lr: What the server's step is multiplied by.
        **settings: Those of Flower's FedAvg.
    """

    def __init__(self, *, server_lr: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self._server_lr = server_lr
        self._start = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as FedAvg does, and remember what the clients start from."""
        self._start = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def check_answer(self, content: RecordDict) -> RecordDict:
        """Refuse an answer that does not tell how far its steps went.

        Raises:
            UploadError: ``travel`` is missing or not positive.
        """
        travel = next(iter(content.metric_records.values()), MetricRecord()).get("travel")
        if not isinstance(travel, int | float) or not 0 < travel < float("inf"):
            raise UploadError(
                f"metrics['travel'] is {str(travel)[:40]}: must be a positive number, the client's local "
                "steps times its learning rate"
            )
        return content

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002  Flower's signature
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model; (None, None) if nobody has answered."""
        answers = answers_of(replies)
        if not answers:
            return None, None
        metrics = [next(iter(content.metric_records.values())) for content in answers]
        model = fednova_step(
            to_numpy(self._start),
            [to_numpy(content["arrays"]) for content in answers],
            weights=[float(each[self.weighted_by_key]) for each in metrics],  # type: ignore[arg-type]
            travels=[float(each["travel"]) for each in metrics],  # type: ignore[arg-type]
            server_lr=self._server_lr,
        )
        return to_record(model), self.train_metrics_aggr_fn(answers, self.weighted_by_key)
