"""The algorithms of rounds that Flower lacks, as its strategies: SCAFFOLD, FedDyn, FedNova, and ternary compression.

First come the rules by which a server combines the models of one round, as pure functions, then the strategies that
apply them. Sums are in double precision and in the given order; models and control variates keep their dtypes.

Papers: FedNova: Wang, Liu, Liang, Joshi, Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020, https://arxiv.org/abs/2007.07481. SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich,
    Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
    https://arxiv.org/abs/1910.06378. FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated
    Learning Based on Dynamic Regularization, ICLR 2021, https://arxiv.org/abs/2111.04263.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ...core import refusals
from ...core.bounds import MOST, shorten_step
from ...uploads.ternary import Compression, flatten_arrays, unflatten_arrays
from ..messages import arrays_name, decode_array, metrics_of
from .answers import decode_record, to_numpy, to_record

# Name of a parameter -> its values.
Arrays = Mapping[str, npt.NDArray[Any]]


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> dict[str, npt.NDArray[np.float64]]:
    """Return ``sum_i w_i x_i / sum_i w_i``, parameter by parameter, in double precision.

    Args:
        models: At least one; equal names and shapes.
        weights: One for each model, not negative, not all 0.
    """
    total = float(sum(weights))
    return {
        name: sum(
            (weight * model[name].astype(np.float64) for model, weight in zip(models, weights, strict=True)),
            start=np.zeros(models[0][name].shape),
        )
        / total
        for name in models[0]
    }


def fednova_change(
    start: Arrays,
    ends: Sequence[Arrays],
    *,
    weights: Sequence[float],
    travels: Sequence[float],
    server_lr: float = 1.0,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return FedNova's change of the model, ``-tau_eff sum_i p_i eta d_i``, with ``d_i = (x - x_i) / (eta ||a_i||_1)``.

    FedNova's update rule, with its effective steps ``tau_eff = sum_i p_i ||a_i||_1``; it equals FedAvg's change if all
    clients take equally many steps. It stays in double precision, where a caller can shorten it before it is added.

    Args:
        start: The model x that the clients started from.
        ends: Their models x_i.
        weights: Their numbers of examples n_i; p_i = n_i / sum n.
        travels: Their eta ||a_i||_1, positive; for plain SGD local steps times the learning rate; see
            :class:`strategies.client.corrections.Travel`.
    """
    effective = float(np.average(travels, weights=weights))
    shares = [weight / travel for weight, travel in zip(weights, travels, strict=True)]
    # sum_i p_i (x_i - x) / travel_i, with the shares' own sum taken out of the mean again.
    scale = server_lr * effective * sum(shares) / float(sum(weights))
    mean = weighted_mean([subtract_models(start, end) for end in ends], shares)
    return {name: scale * value for name, value in mean.items()}


def scaffold_step(start: Arrays, ends: Sequence[Arrays], *, server_lr: float = 1.0) -> dict[str, npt.NDArray[Any]]:
    """Return the next model of SCAFFOLD, ``x + eta_g / |S| sum_{i in S} (y_i - x)``; Algorithm 1, lines 16 and 17.

    Args:
        start: The model x that the clients started from.
        ends: Their models y_i.
        server_lr: eta_g.
    """
    return add_step(start, weighted_mean([subtract_models(start, end) for end in ends], [1.0] * len(ends)), server_lr)


def next_control(control: Arrays, changes: Sequence[Arrays], *, num_clients: int) -> dict[str, npt.NDArray[Any]]:
    """Return the server's next control variate, ``c + 1/N sum_{i in S} (c_i+ - c_i)``; Algorithm 1, line 17.

    Args:
        control: c.
        changes: ``c_i+ - c_i`` of the clients of this round.
        num_clients: N, the number of all clients, in this round or not.
    """
    return add_step(control, weighted_mean(changes, [1.0] * len(changes)), len(changes) / num_clients)


def feddyn_step(
    start: Arrays, ends: Sequence[Arrays], *, drift: Arrays, num_clients: int
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
    """Return the next model of FedDyn, and the mean drift of all clients; Algorithm 1, lines 12 and 13.

    The clients' drifts are ``h_k += w_k - w``; the paper's ``h`` is ``-alpha`` times their mean over all clients. The
    server updates that mean without any h_k: ``mean_h += 1/N sum_{k in S} (w_k - w)``. The next model is
    ``1/|S| sum_{k in S} w_k + mean_h``.

    Args:
        start: The model w that the clients started from.
        ends: Their models w_k.
        drift: mean_h before the round.
        num_clients: N, the number of all clients, in this round or not.
    """
    mean = weighted_mean([subtract_models(start, end) for end in ends], [1.0] * len(ends))
    now = add_step(drift, mean, len(ends) / num_clients)
    return add_step(start, {name: step + now[name] for name, step in mean.items()}), now


def subtract_models(start: Arrays, end: Arrays) -> dict[str, npt.NDArray[np.float64]]:
    """Return ``end - start`` in double precision."""
    return {name: end[name].astype(np.float64) - start[name] for name in start}


def add_step(start: Arrays, step: Arrays, scale: float = 1.0) -> dict[str, npt.NDArray[Any]]:
    """Return ``start + scale * step`` in the dtypes of ``start``."""
    return {name: (value + scale * step[name]).astype(value.dtype) for name, value in start.items()}


class SteppedFedAvg(FedAvg):
    """FedAvg whose next model is a step from the start of the round."""

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
        answers = [reply.content for reply in replies if not reply.has_error()]
        if not answers:
            return None, None
        model = self.step(self._start, answers, num_clients=max(self._num_clients, len(answers)))
        return to_record(model), self.train_metrics_aggr_fn(answers, self.weighted_by_key)

    @abstractmethod
    def step(self, start: Arrays, answers: Sequence[RecordDict], *, num_clients: int) -> Arrays:
        """Return the next model, and move the server's state.

        Args:
            answers: The clients' answers, at least one; see :func:`models_of`.
            num_clients: N, the clients of the federation.
        """


def models_of(answers: Sequence[RecordDict]) -> list[Arrays]:
    """Return the models of the answers, each their one array record, or that named ``arrays``."""
    return [to_numpy(content[arrays_name(content)]) for content in answers]


def zeros_like(arrays: ArrayRecord) -> Arrays:
    """Return zeros in the shapes of a model's parameters, by name."""
    return {name: np.zeros_like(value) for name, value in to_numpy(arrays).items()}


# SCAFFOLD as a Flower strategy: control variates of server and clients take the drift out of local steps.
#
# A request carries the server's control variate c as the record ``control``, an answer the change of the client's own.
# The clients' half is :class:`strategies.client.corrections.ControlVariates`.


class Scaffold(SteppedFedAvg):
    """Stochastic controlled averaging; see :mod:`strategies.flower.rounds.algorithms`.

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
    """Federated learning with dynamic regularisation; see :func:`strategies.flower.rounds.algorithms.feddyn_step`.

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
    """Federated learning with normalised averaging; see :func:`strategies.flower.rounds.algorithms.fednova_change`.

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


# FedAvg with sparse ternary compression: both ways, updates travel as a few entries.
#
# A client that was in the round before gets the last update, others get the whole model. The rest that compression
# leaves out of an update is added to the next one, on either side. The clients' half is
# :class:`strategies.client.corrections.SparseUpdate`; the code is :mod:`strategies.uploads.ternary`.


class Stc(FedAvg):
    """Sparse ternary compression around FedAvg.

    Args:
        density: p, the share of entries that is sent, in (0, 1].
        values: "ternary", their signs and one magnitude, or "float16", each in 16 bits.
        **settings: Those of Flower's FedAvg.

    Attributes:
        left: The rest of the server's updates so far, float32 [n]; None before the first.
        clients_remember: The clients keep the rest of their updates from round to round.
    """

    clients_remember = True

    def __init__(self, *, density: float, values: str = "ternary", **settings: Any) -> None:
        super().__init__(**settings)
        self.left: np.ndarray[Any, Any] | None = None
        self._compression = Compression(density, values)
        self._start: dict[str, np.ndarray[Any, Any]] = {}
        self._update = ArrayRecord()
        self._holders: set[int] = set()
        self._made: dict[str, np.ndarray[Any, Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as FedAvg does; who holds the model of the round before gets the update to it alone.

        The update leads to the model that was returned last. Handed another one, a refined one say, it is of no use.
        """
        self._start = to_numpy(arrays)
        if not _equal(self._start, self._made):
            self._holders = set()
        config["stc-density"] = self._compression.density
        if self._compression.values != "ternary":  # a client's default
            config["stc-values"] = self._compression.values
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            if message.metadata.dst_node_id in self._holders:
                message.content = RecordDict(
                    {**message.content, self.arrayrecord_key: ArrayRecord(), "ternary": self._update}
                )
        self._holders = set()  # if this round fails, the holders are unknown
        return messages

    def check_answer(self, content: RecordDict) -> RecordDict:
        """Put the client's model together from its start and its update.

        Raises:
            UploadError: The update is no code for this model.
        """
        record = content.array_records.get("ternary")
        if record is None:
            raise refusals.missing_record("ternary")
        code = {}
        for name, array in list(record.items())[:3]:
            dtype = {"bits": "uint8", "values": "float16"}.get(name, "float32")
            if len(array.shape) != 1 or not 0 < array.shape[0] <= len(array.data):
                raise refusals.broken_rule(f"ternary[{name[:80]!r}] has shape {list(array.shape[:9])}", "one row")
            code[name] = decode_array(array, tuple(array.shape), dtype, f"ternary[{name[:80]!r}]")
        size = sum(value.size for value in self._start.values())
        update = unflatten_arrays(self._compression.decode(code, size, "ternary").dense(), self._start)
        model = to_record({name: value + update[name] for name, value in self._start.items()})
        sent = content.array_records.get(self.arrayrecord_key, ArrayRecord())
        others = {name: array for name, array in sent.items() if name not in self._start}
        rest = {name: found for name, found in content.items() if name not in (self.arrayrecord_key, "ternary")}
        return RecordDict({**rest, self.arrayrecord_key: ArrayRecord({**others, **model})})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model moved by the compressed mean of the updates; (None, None) without an answer."""
        replies = list(replies)
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, None
        left = self.left if self.left is not None else 0.0
        wanted = flatten_arrays(to_numpy(mean)) - flatten_arrays(self._start) + left
        sent = self._compression.compress(wanted)
        self.left = wanted - sent.dense()
        self._update = to_record(self._compression.encode(sent))
        self._holders = {reply.metadata.src_node_id for reply in replies if not reply.has_error()}
        step = unflatten_arrays(sent.dense(), self._start)
        self._made = {name: value + step[name] for name, value in self._start.items()}
        return to_record(self._made), metrics


def _equal(one: Mapping[str, np.ndarray[Any, Any]], other: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
