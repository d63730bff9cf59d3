"""The corrections of local training that strategies in rounds request, for any ClientApp.

In a few lines::

    from oneshot_fl.client.corrections import LocalUpdate, read_round

    update = LocalUpdate(model, *read_round(msg), momentum=0.9, memory=RoundState.of("", run_id, "hospital-a"))
    for images, labels in batches:
        optimizer.zero_grad()
        logits = model(images)
        (criterion(logits, labels) + update.penalty(model, logits, labels)).backward()
        optimizer.step()
        update.step(lr)
    records, metrics = update.finish(model)

``records`` and ``metrics`` belong into the answer, beside the number of examples. ``update`` reads the request: FedProx
sends ``proximal-mu``, FedDyn ``feddyn-alpha``, SCAFFOLD its control variate, STC its compression, FedGen its generator.
Without any of them the penalty is 0; several of them add up. Each class here works alone too, and so does
:class:`.generated.GeneratedExamples`. :mod:`.round_state` keeps the state that outlives a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from ..client import read_arrays
from ..core import refusals
from ..core.clients import read_float, read_int
from ..core.facts import part_of
from ..core.places import check_round
from ..uploads.ternary import LEAST_DENSITY, VALUES, Compression, flatten_arrays, unflatten_arrays
from .generated import GeneratedExamples
from .round_state import RoundState

# A model's trainable parameters by name, without buffers: the corrections of local training act on these.

State = dict[str, torch.Tensor]


def parameters_of(model: nn.Module) -> State:
    """Return copies of a model's trainable parameters by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def load_or_zeros(kept: Mapping[str, torch.Tensor], start: State) -> State:
    """Return a client's kept value of every parameter, or zeros if no kept value fits.

    Args:
        kept: Kept values by name of parameter; empty for none.
    """
    if shapes_of(kept) == shapes_of(start):
        return beside(kept, start)
    return {name: torch.zeros_like(value) for name, value in start.items()}


def beside(state: Mapping[str, torch.Tensor], start: State) -> State:
    """Return a state on the devices of its parameters."""
    return {name: state[name].to(value.device) for name, value in start.items()}


def inner(model: nn.Module, other: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``<w, other>`` over all parameters w, a scalar; its gradient is ``other``."""
    return torch.stack([(value * other[name]).sum() for name, value in model.named_parameters()]).sum()


def squared_distance(model: nn.Module, start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``||w - start||^2`` over all parameters w, a scalar."""
    return torch.stack([(value - start[name]).square().sum() for name, value in model.named_parameters()]).sum()


def arrays_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as numpy arrays."""
    return {name: value.cpu().numpy() for name, value in state.items()}


def shapes_of(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes, to compare two states."""
    return {name: tuple(value.shape) for name, value in state.items()}


@dataclass
class Travel:
    """The distance that SGD's steps move a weight whose gradient is always 1: eta ||a_i||_1 of FedNova.

    Plain SGD moves it by K eta in K steps. With momentum rho, a gradient also counts in all later steps.

    Attributes:
        momentum: rho, in [0, 1).
    """

    momentum: float = 0.0
    length: float = 0.0
    _speed: float = 0.0

    def step(self, lr: float, *, at_rest: bool = False) -> None:
        """Count one step with the learning rate ``lr``; at rest its optimiser had no momentum before it."""
        self._speed = (0.0 if at_rest else self.momentum * self._speed) + 1.0
        self.length += lr * self._speed


class ControlVariates:
    """SCAFFOLD: local steps follow ``g - c_i + c``; Algorithm 1, lines 9 to 14, option II.

    Args:
        model: Holds x, the start of local training.
        server: c, by name of parameter.
        own: c_i; empty for a client that has none yet, which means zeros.

    Raises:
        UploadError: The server's control variate has other names or shapes than the model's parameters.
    """

    def __init__(self, model: nn.Module, server: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
        self._start = parameters_of(model)
        if shapes_of(server) != shapes_of(self._start):
            raise refusals.other_shapes("control variate has", "the model's parameters")
        self._server, self._own = beside(server, self._start), load_or_zeros(own, self._start)
        self._added = {name: self._server[name] - self._own[name] for name in self._start}

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return ``<w, c - c_i>``, a scalar; its gradient is ``c - c_i``."""
        return inner(model, self._added)

    def finish(self, model: nn.Module, travel: float) -> tuple[State, State]:
        """Return ``c_i+ = c_i - c + (x - y_i) / (K eta_l)`` and the change ``c_i+ - c_i``.

        Args:
            model: Holds y_i.
            travel: K eta_l, see :class:`Travel`.

        Raises:
            UploadError: No step was counted.
        """
        if not travel > 0:
            raise refusals.no_steps(travel)
        ends = parameters_of(model)
        change = {name: (self._start[name] - ends[name]) / travel - self._server[name] for name in ends}
        return {name: self._own[name] + change[name] for name in change}, change


# Terms that tie local training to the server's model: FedProx's and FedDyn's.
#
# Papers: FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
# https://arxiv.org/abs/1812.06127. FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated
# Learning Based on Dynamic Regularization, ICLR 2021, https://arxiv.org/abs/2111.04263.
# Symbols: mu -> mu; alpha -> alpha; FedDyn's gradient memory -grad L_k(theta_k) / alpha -> h_k, in units of weights:
# h_k += w_k - w in every round.
# Deviations: both terms are part of the loss. Clipping acts on them and the gradient together, and the optimiser's
# weight decay adds to them. Published code of FedDyn has alpha / 2 ||w||^2 in the weight decay, outside the clipping.
# FedDyn's term is written around the start, without the constant alpha / 2 ||w_start||^2: the constant has no
# gradient and would drown the reported loss. alpha is the same for all clients, as in the paper; the code of FedFTG
# divides it by the client's size over the mean size, which is equal for clients of equal size. For clients of unequal
# size, one alpha leads to the optimum of the plain mean of the clients' objectives.


class Proximal:
    """FedProx adds ``mu / 2 ||w - w_t||^2`` to the loss; its Eq. (2).

    Args:
        model: Holds w_t.
        mu: At least 0.
    """

    def __init__(self, model: nn.Module, mu: float) -> None:
        self._start, self._mu = parameters_of(model), mu

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return the term, a scalar; its gradient is ``mu (w - w_t)``."""
        return self._mu / 2 * squared_distance(model, self._start)


class DynamicRegularizer:
    """FedDyn adds ``alpha <w, h_k - w_t> + alpha / 2 ||w||^2``; its Algorithm 1, in the terms of h_k.

    At a minimum of the local objective, the gradient of the client's own loss is ``-alpha`` times the new h_k.

    Args:
        model: Holds w_t, the start of local training.
        alpha: Above 0.
        drift: h_k; empty for a client that has none yet, which means zeros.
    """

    def __init__(self, model: nn.Module, alpha: float, drift: Mapping[str, torch.Tensor]) -> None:
        self._start, self._alpha = parameters_of(model), alpha
        self._drift = load_or_zeros(drift, self._start)

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return the term up to a constant, a scalar; its gradient is ``alpha (h_k + w - w_t)``."""
        return self._alpha * (inner(model, self._drift) + squared_distance(model, self._start) / 2)

    def finish(self, model: nn.Module) -> State:
        """Return the next ``h_k``, ``h_k + w_k - w_t``.

        Args:
            model: Holds w_k.
        """
        ends = parameters_of(model)
        return {name: self._drift[name] + (ends[name] - self._start[name]) for name in ends}


# STC on the client: the largest entries of an update, and the start that such an update leads to.
#
# Paper: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data,
# TNNLS 2020, https://arxiv.org/abs/1903.02891; the code is :mod:`strategies.uploads.ternary`.


def compression_of(density: float, said: Mapping[str, Any]) -> Compression | None:
    """Return the compression that a request asks for; None if it asks for none.

    Args:
        density: Its ``stc-density``; 0 for none.

    Raises:
        UploadError: It asks for one that does not exist.
    """
    values = str(said.get("stc-values", VALUES[0]))
    if not density:
        return None
    if not LEAST_DENSITY <= density <= 1.0 or values not in VALUES:
        raise refusals.bad_request(
            "stc-density with stc-values",
            (density, values[:80]),
            f"at least {LEAST_DENSITY} and at most 1, and one of {', '.join(VALUES)}",
        )
    return Compression(density, values)


class SparseUpdate:
    """STC sends the update's largest entries, and adds the rest to the next update.

    Args:
        model: Holds the weights that local training starts from.
        compression: The share of the entries to send, and their form.
        left: The rest of earlier rounds, float32 [n]; None for nothing.
    """

    def __init__(self, model: nn.Module, compression: Compression, left: torch.Tensor | None) -> None:
        self._start, self._compression = arrays_of(parameters_of(model)), compression
        size = sum(value.size for value in self._start.values())
        self._left = left.numpy() if left is not None and left.shape == (size,) else 0.0

    def finish(self, model: nn.Module) -> tuple[State, torch.Tensor]:
        """Return the code of the update, see :class:`strategies.uploads.ternary.Compression`, and its rest [n]."""
        wanted = flatten_arrays(arrays_of(parameters_of(model))) - flatten_arrays(self._start) + self._left
        sent = self._compression.compress(wanted)
        code = {name: torch.from_numpy(value) for name, value in self._compression.encode(sent).items()}
        return code, torch.from_numpy(wanted - sent.dense())


def load_start(model: nn.Module, sent: Mapping[str, State], compression: Compression | None, kept: State) -> None:
    """Give a model the weights of a request: the weights sent, or those of the round before plus a sparse update.

    Args:
        compression: Of the sparse update; None if none may come.
        kept: The client's state of the round before; empty if it took no part in it.

    Raises:
        UploadError: The weights do not fit the model, or the client lacks the weights that the update builds on.
    """
    state = {**sent.get("arrays", {})}
    if "ternary" in sent and compression is not None:
        before = arrays_of(part_of(kept, "start."))
        if not before:
            raise refusals.lost_state("the weights of the round before, which the server's update builds on")
        code = {name: value.numpy() for name, value in sent["ternary"].items()}
        step = unflatten_arrays(
            compression.decode(code, flatten_arrays(before).size, "the server's update").dense(), before
        )
        state.update({name: torch.from_numpy(value + step[name]) for name, value in before.items()})
    if shapes_of(state) != shapes_of(model.state_dict()):
        raise refusals.other_shapes("weights have", "this client's model")
    model.load_state_dict(state)


class OnWeights(Protocol):
    """A correction that depends on the weights alone."""

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return the term added to the loss of a batch, a scalar."""


class OnBatches(Protocol):
    """A correction that depends on the model's outputs for a batch."""

    def penalty(self, model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the term added to the loss of a batch, a scalar.

        Args:
            logits: [B, C], with their graph.
            labels: [B].
        """

    def step(self) -> None:
        """Count the batch as trained on."""


class LocalUpdate:
    """One client's part of one round, for every strategy; see the module.

    Args:
        model: Receives the weights that local training starts from.
        momentum: Momentum of the client's SGD; 0 for none.
        memory: The client's state of earlier rounds; None: every round starts without one.
        label_counts: The client's examples per class [C], which end a generator's epochs; None: it takes part in all.

    Raises:
        UploadError: The request does not fit the model, or builds on a state that the client has lost.
    """

    def __init__(
        self,
        model: nn.Module,
        said: Mapping[str, Any],
        sent: Mapping[str, State],
        *,
        momentum: float = 0.0,
        memory: RoundState | None = None,
        label_counts: Sequence[int] | None = None,
    ) -> None:
        self._round = read_int(said, "server-round", 1)
        check_round(self._round)
        self._last, self._safe = (read_int(said, key) if key in said else None for key in ("last-round", "safe-round"))
        self._memory = memory or RoundState(None, str(said.get("client", "client")))
        self._travel = Travel(momentum)
        mu, alpha = (read_float(said, key, 0.0) for key in ("proximal-mu", "feddyn-alpha"))
        sparse, self._recalled = compression_of(read_float(said, "stc-density", 0.0), said), None
        if sparse or alpha or "control" in sent:
            self._recalled = self._memory.recall(self._round, self._last)
        kept = self._recalled.state if self._recalled else {}
        load_start(model, sent, sparse, kept if self._recalled and self._recalled.round == self._round - 1 else {})
        self._control = ControlVariates(model, sent["control"], part_of(kept, "own.")) if "control" in sent else None
        self._dynamic = DynamicRegularizer(model, alpha, part_of(kept, "drift.")) if alpha else None
        self._sparse = SparseUpdate(model, sparse, kept.get("left")) if sparse else None
        self._start = parameters_of(model) if sparse else {}
        proximal = Proximal(model, mu) if mu else None
        self._on_weights: list[OnWeights] = [part for part in (proximal, self._control, self._dynamic) if part]
        self._on_batches: list[OnBatches] = []
        if "generator" in sent:
            self._on_batches.append(
                GeneratedExamples(
                    model, said, sent["generator"],
                    client=self._memory.client, server_round=self._round, label_counts=label_counts,
                )
            )  # fmt: skip

    def penalty(
        self, model: nn.Module, logits: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the term added to the loss of a batch, a scalar; 0 if the strategy adds none.

        Args:
            logits: Its outputs for the batch [B, C]; without them, corrections that depend on the batch add nothing.
            labels: [B].
        """
        terms = [part.penalty(model) for part in self._on_weights]
        if logits is not None and labels is not None:
            terms += [part.penalty(model, logits, labels) for part in self._on_batches]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def step(self, lr: float, *, at_rest: bool = False) -> None:
        """Count a step taken with the learning rate ``lr``; at rest its optimiser had no momentum before it."""
        self._travel.step(lr, at_rest=at_rest)
        for part in self._on_batches:
            part.step()

    def finish(self, model: nn.Module) -> tuple[dict[str, State], dict[str, float]]:
        """Return the array records and the metrics of the answer, and save the state for the next round.

        Metrics: ``travel``, the length of the steps. Strategies with a state add ``restarted``: 1 if the server counts
        on a state that the client has lost, else 0.

        Raises:
            UploadError: SCAFFOLD needs a counted step, and none was counted.
        """
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        records: dict[str, State] = {"arrays": state}
        kept: State = {}
        if self._control is not None:
            own, records["control"] = self._control.finish(model, self._travel.length)
            kept |= {f"own.{name}": value for name, value in own.items()}
        if self._dynamic is not None:
            kept |= {f"drift.{name}": value for name, value in self._dynamic.finish(model).items()}
        if self._sparse is not None:
            records["ternary"], kept["left"] = self._sparse.finish(model)
            records["arrays"] = {name: value for name, value in state.items() if name not in self._start}
            kept |= {f"start.{name}": value for name, value in self._start.items()}
        metrics = {"travel": self._travel.length}
        if self._recalled is not None:
            self._memory.save(self._round, kept, self._safe, last_round=self._last)
            metrics["restarted"] = float(self._recalled.restarted)
        return records, metrics


def read_round(msg: Message) -> tuple[dict[str, Any], dict[str, State]]:
    """Return a request's config and its arrays by name of record.

    Raises:
        UploadError: Names an array that cannot be read.
    """
    records = msg.content.array_records
    config = msg.content.config_records.get("config", ConfigRecord())
    return dict(config), {name: read_arrays(record, torch.from_numpy) for name, record in records.items()}
