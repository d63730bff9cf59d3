"""FedAvg with another step: the common part of SCAFFOLD, FedDyn and FedNova as Flower strategies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ...core import refusals
from ...core.bounds import MOST, shorten_step
from ..messages import arrays_name, metrics_of
from .answers import answers_of, decode_record, to_numpy, to_record
from .rules import add_step, feddyn_step, fednova_change, next_control, scaffold_step, subtract_models

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


# SCAFFOLD as a Flower strategy: control variates of server and clients take the drift out of local steps.
#
# A request carries the server's control variate c as the record ``control``, an answer the change of the client's own.
# The clients' half is :class:`strategies.client.corrections.ControlVariates`.


class Scaffold(SteppedFedAvg):
    """Stochastic controlled averaging; see :mod:`strategies.flower.rounds.rules`.

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
        change = decode_record(content, "control", self.control)
        return RecordDict({**content, "control": to_record(change)})

    def step(self, start: Arrays, answers: Sequence[RecordDict], *, num_clients: int) -> Arrays:
        """Return the next model, and move the control variate."""
        changes = [to_numpy(content["control"]) for content in answers]
        self.control = next_control(self.control, changes, num_clients=num_clients)
        return scaffold_step(start, models_of(answers), server_lr=self._server_lr)


# FedDyn as a Flower strategy: a client's next steps take back the drift of its models so far.
#
# A request sends alpha as ``feddyn-alpha``; an answer is the client's model alone, because the server follows the
# mean of the clients' drifts by itself. The clients' half is
# :class:`strategies.client.corrections.DynamicRegularizer`.


class FedDyn(SteppedFedAvg):
    """Federated learning with dynamic regularisation; see :func:`strategies.flower.rounds.rules.feddyn_step`.

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


# FedNova as a Flower strategy: updates are divided by the way that their steps went, before they are averaged.
#
# Its clients report that way as the metric ``travel``, see :class:`strategies.client.corrections.Travel`.


# Far beyond every honest way, with a decayed rate too; and no product or quotient of two leaves double precision.
LEAST_TRAVEL, MOST_TRAVEL = 1e-30, 1e30


class FedNova(SteppedFedAvg):
    """Federated learning with normalised averaging; see :func:`strategies.flower.rounds.rules.fednova_change`.

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
        """Refuse an answer without the length of its local steps.

        Raises:
            UploadError: ``travel`` is missing, not positive, or no possible way.
        """
        travel = metrics_of(content).get("travel")
        if not isinstance(travel, int | float) or not LEAST_TRAVEL <= travel <= MOST_TRAVEL:
            raise refusals.bad_metric(
                "travel",
                travel,
                f"a positive number from {LEAST_TRAVEL:g} to {MOST_TRAVEL:g}, the client's local steps times its "
                "learning rate",
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
        model = add_step(start, shorten_step(start, change, ends, MOST * max(1.0, self._server_lr)))
        if not self._server_momentum:
            return model
        step = {name: value.astype(np.float32) for name, value in subtract_models(start, model).items()}
        self.velocity = add_step(step, self.velocity, self._server_momentum) if self.velocity else step
        return add_step(start, self.velocity)
