"""What the strategies that run in rounds ask of local training, for any ClientApp.

In a few lines::

    from strategies.client.corrections import LocalUpdate, read_round

    update = LocalUpdate(model, *read_round(msg), momentum=0.9, memory=RoundState.of("", run_id, "hospital-a"))
    for images, labels in batches:
        optimizer.zero_grad()
        (criterion(model(images), labels) + update.penalty(model)).backward()
        optimizer.step()
        update.step(lr)
    records, metrics = update.finish(model)

``records`` and ``metrics`` are what the answer holds beside its number of examples. ``update`` reads the request:
FedProx sends ``proximal-mu``, SCAFFOLD its control variate, STC its density; without any of them the penalty is 0.
Each part can be used alone.

Papers: FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
    https://arxiv.org/abs/1812.06127. FedNova, SCAFFOLD: see :mod:`strategies.federated`. STC: see
    :mod:`strategies.ternary`.
Deviations: SCAFFOLD's K eta_l, the way that a gradient of 1 moves a weight in K steps, is counted for SGD with momentum
    too (:class:`Travel`), so that its control variates stay mean gradients; without momentum it is K eta_l.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from ..errors import UploadError
from ..ternary import decode, encode, flat, sparse_ternary, unflat
from .round_state import LOG, RoundState

State = dict[str, torch.Tensor]


@dataclass
class Travel:
    """How far SGD's steps carry a weight whose gradient is 1 all the time: eta ||a_i||_1 of FedNova.

    Plain SGD goes K eta in K steps. With momentum rho a gradient counts in all later steps, too.

    Attributes:
        momentum: rho, in [0, 1).
        length: The way so far.
    """

    momentum: float = 0.0
    length: float = 0.0
    _speed: float = 0.0

    def step(self, lr: float) -> None:
        """Count one step with the learning rate ``lr``."""
        self._speed = self.momentum * self._speed + 1.0
        self.length += lr * self._speed


class Proximal:
    """FedProx: ``mu / 2 ||w - w_t||^2`` is added to the loss; its Eq. (2).

    Args:
        model: It holds w_t.
        mu: At least 0.
    """

    def __init__(self, model: nn.Module, mu: float) -> None:
        self._start, self._mu = parameters_of(model), mu

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return the term, a scalar; its gradient is ``mu (w - w_t)``."""
        apart = [(value - self._start[name]).square().sum() for name, value in model.named_parameters()]
        return self._mu / 2 * torch.stack(apart).sum()


class ControlVariates:
    """SCAFFOLD: local steps follow ``g - c_i + c``; Algorithm 1, lines 9 to 14, option II.

    Args:
        model: It holds x, which local training starts from.
        server: c, by name of parameter.
        own: c_i; empty for a client that has none yet: zeros.
    """

    def __init__(self, model: nn.Module, server: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
        self._start = parameters_of(model)
        if _shapes(server) != _shapes(self._start):
            raise UploadError("the server's control variate has other names or shapes than the model's parameters")
        self._server = dict(server)
        fits = _shapes(own) == _shapes(self._start)
        self._own = dict(own) if fits else {name: torch.zeros_like(value) for name, value in self._start.items()}
        self._added = {name: self._server[name] - self._own[name] for name in self._start}

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return ``<w, c - c_i>``, a scalar; its gradient is ``c - c_i``."""
        return torch.stack([(value * self._added[name]).sum() for name, value in model.named_parameters()]).sum()

    def finish(self, model: nn.Module, travel: float) -> tuple[State, State]:
        """Return ``c_i+ = c_i - c + (x - y_i) / (K eta_l)`` and the change ``c_i+ - c_i``.

        Args:
            model: It holds y_i.
            travel: K eta_l, see :class:`Travel`.
        """
        ends = parameters_of(model)
        change = {name: (self._start[name] - ends[name]) / travel - self._server[name] for name in ends}
        return {name: self._own[name] + change[name] for name in change}, change


class SparseUpdate:
    """STC: the update is sent as its largest entries' signs; what that leaves out is added to the next update.

    Args:
        model: It holds the weights that local training starts from.
        density: p, the share of entries that is sent, in (0, 1].
        left: What earlier rounds left out, float32 [n]; None for nothing.
    """

    def __init__(self, model: nn.Module, density: float, left: torch.Tensor | None) -> None:
        self._start, self._density = _arrays(parameters_of(model)), density
        size = sum(value.size for value in self._start.values())
        self._left = left.numpy() if left is not None and left.shape == (size,) else 0.0

    def finish(self, model: nn.Module) -> tuple[State, torch.Tensor]:
        """Return the code of the update (see :func:`strategies.ternary.encode`), and what it leaves out [n]."""
        wanted = flat(_arrays(parameters_of(model))) - flat(self._start) + self._left
        sent = sparse_ternary(wanted, self._density)
        code = {name: torch.from_numpy(value) for name, value in encode(sent, self._density).items()}
        return code, torch.from_numpy(wanted - sent.dense())


class LocalUpdate:
    """One client's part of one round, whichever strategy asks; see the module.

    Args:
        model: It gets the weights that local training starts from.
        said: The request's config.
        sent: The request's arrays by name of record.
        momentum: Of the client's SGD; 0 for none.
        memory: What the client remembers; None: nothing, every round begins anew.

    Raises:
        UploadError: The request does not fit the model, or what it builds on is not here any more.
    """

    def __init__(
        self,
        model: nn.Module,
        said: Mapping[str, Any],
        sent: Mapping[str, State],
        *,
        momentum: float = 0.0,
        memory: RoundState | None = None,
    ) -> None:
        self._round = int(said.get("server-round", 1))
        self._memory = memory or RoundState(None, str(said.get("client", "client")))
        self._travel = Travel(momentum)
        density, mu = float(said.get("stc-density", 0.0)), float(said.get("proximal-mu", 0.0))
        remembering = bool(density) or "control" in sent
        known, kept = self._memory.before(self._round) if remembering else (0, {})
        load_start(model, sent, density, kept if known == self._round - 1 else {})
        if remembering and not kept and self._round > 1:
            LOG.warning("%s: nothing of earlier rounds is kept here: it goes on from zero", self._memory.client)
        self._proximal = Proximal(model, mu) if mu else None
        self._control = ControlVariates(model, sent["control"], _part(kept, "own.")) if "control" in sent else None
        self._sparse = SparseUpdate(model, density, kept.get("left")) if density else None
        self._start = parameters_of(model) if density else {}

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return what is added to the loss of a batch, a scalar; 0 if the strategy adds nothing."""
        terms = [part.penalty(model) for part in (self._proximal, self._control) if part is not None]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def step(self, lr: float) -> None:
        """Count a step that was taken with the learning rate ``lr``."""
        self._travel.step(lr)

    def finish(self, model: nn.Module) -> tuple[dict[str, State], dict[str, float]]:
        """Return the array records and the metrics of the answer, and remember what the next round needs."""
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        records: dict[str, State] = {"arrays": state}
        if self._control is not None:
            own, records["control"] = self._control.finish(model, self._travel.length)
            self._memory.save(self._round, {f"own.{name}": value for name, value in own.items()})
        if self._sparse is not None:
            records["ternary"], left = self._sparse.finish(model)
            records["arrays"] = {name: value for name, value in state.items() if name not in self._start}
            start = {f"start.{name}": value for name, value in self._start.items()}
            self._memory.save(self._round, {**start, "left": left})
        return records, {"travel": self._travel.length}


def read_round(msg: Message) -> tuple[dict[str, Any], dict[str, State]]:
    """Return a request's config and its arrays by name of record."""
    records = msg.content.array_records
    config = msg.content.config_records.get("config", ConfigRecord())
    return dict(config), {name: dict(record.to_torch_state_dict()) for name, record in records.items()}


def load_start(model: nn.Module, sent: Mapping[str, State], density: float, kept: State) -> None:
    """Give a model the weights of a request: as they were sent, or those of the round before and a ternary update.

    Args:
        model: It is changed.
        sent: The request's arrays by name of record.
        density: p of the ternary update.
        kept: What the client remembers of the round before; empty if it was not in it.

    Raises:
        UploadError: They do not fit the model, or the weights that the update belongs to are not here.
    """
    state = {**sent.get("arrays", {})}
    if "ternary" in sent:
        before = _arrays(_part(kept, "start."))
        if not before:
            raise UploadError("the weights of the round before, which the server's update belongs to, are not here")
        code = {name: value.numpy() for name, value in sent["ternary"].items()}
        step = unflat(decode(code, flat(before).size, density, "the server's update").dense(), before)
        state.update({name: torch.from_numpy(value + step[name]) for name, value in before.items()})
    if _shapes(state) != _shapes(model.state_dict()):
        raise UploadError("the server's weights have other names or shapes than this client's model")
    model.load_state_dict(state)


def parameters_of(model: nn.Module) -> State:
    """Return copies of a model's trainable parameters by name; buffers are no part of any correction."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _part(kept: Mapping[str, torch.Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}


def _arrays(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.cpu().numpy() for name, value in state.items()}


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
