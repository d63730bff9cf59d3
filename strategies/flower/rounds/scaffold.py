"""SCAFFOLD as a Flower strategy: control variates of server and clients take the drift out of local steps.

A request carries the server's control variate c as the record ``control``, an answer the change of the client's own.
The clients' half is :class:`strategies.client.corrections.ControlVariates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ...rounds.rules import next_control, scaffold_step
from .round_records import checked_record, to_numpy, to_record
from .stepped import Arrays, SteppedFedAvg, models_of, zeros_like


class Scaffold(SteppedFedAvg):
    """Stochastic controlled averaging; see :mod:`strategies.rounds.rules`.

    Args:
        server_lr: eta_g.
        **settings: Those of Flower's FedAvg.

    Attributes:
        control: c, by name of parameter; empty before the first round, as if all were 0.
        clients_remember: The clients keep control variates from round to round.
        equal_buffers: Buffers are averaged like the models, with equal weights.
        bounded_records: The clients' changes of their control variates are bounded like those of their models.
    """

    clients_remember = True
    equal_buffers = True
    bounded_records = ("control",)

    def __init__(self, *, server_lr: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.control: Arrays = {}
        self._server_lr = server_lr

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as FedAvg does, with the control variate; the optional ``num-clients`` of the config is N."""
        self.control = self.control or zeros_like(arrays)
        control = to_record(self.control)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["control"] = control
        return messages

    def check_answer(self, content: RecordDict) -> RecordDict:
        """Check the change of the client's control variate.

        Raises:
            UploadError: It is missing, or has other names or shapes than the server's.
        """
        change = checked_record(content, "control", self.control)
        return RecordDict({**content, "control": to_record(change)})

    def step(self, start: Arrays, answers: Sequence[RecordDict], *, num_clients: int) -> Arrays:
        """Return the next model, and move the control variate."""
        changes = [to_numpy(content["control"]) for content in answers]
        self.control = next_control(self.control, changes, num_clients=num_clients)
        return scaffold_step(start, models_of(answers), server_lr=self._server_lr)
