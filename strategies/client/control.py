"""SCAFFOLD's control variates on the client, and how far local steps go, which FedNova divides by, too.

Paper: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning, ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1 with option II; FedNova: see
    :mod:`strategies.rounds.rules`.
Deviations: K eta_l, the way that a gradient of 1 moves a weight in K steps, is counted for SGD with momentum too
    (:class:`Travel`), so that the control variates stay mean gradients; without momentum it is K eta_l. It is counted
    with the learning rates that the steps were taken with, and the start is the model that the server sent, refined or
    not; published code of FedFTG takes the rate of the first round, and the model before its refinement. Weight decay
    is part of the gradients, and so of the control variates. Clipping acts on ``g - c_i + c``: where it shortens a
    step, the new control variate is that of the shortened one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..core.errors import UploadError
from .parameters import State, beside, inner, kept_or_zero, parameters_of, shapes_of


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


class ControlVariates:
    """SCAFFOLD: local steps follow ``g - c_i + c``; Algorithm 1, lines 9 to 14, option II.

    Args:
        model: It holds x, which local training starts from.
        server: c, by name of parameter.
        own: c_i; empty for a client that has none yet: zeros.

    Raises:
        UploadError: The server's is not like the model's parameters.
    """

    def __init__(self, model: nn.Module, server: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
        self._start = parameters_of(model)
        if shapes_of(server) != shapes_of(self._start):
            raise UploadError("the server's control variate has other names or shapes than the model's parameters")
        self._server, self._own = beside(server, self._start), kept_or_zero(own, self._start)
        self._added = {name: self._server[name] - self._own[name] for name in self._start}

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return ``<w, c - c_i>``, a scalar; its gradient is ``c - c_i``."""
        return inner(model, self._added)

    def finish(self, model: nn.Module, travel: float) -> tuple[State, State]:
        """Return ``c_i+ = c_i - c + (x - y_i) / (K eta_l)`` and the change ``c_i+ - c_i``.

        Args:
            model: It holds y_i.
            travel: K eta_l, see :class:`Travel`.

        Raises:
            UploadError: No step was counted.
        """
        if not travel > 0:
            raise UploadError(f"the way of the local steps is {travel}: must be one above 0, counted by step(lr)")
        ends = parameters_of(model)
        change = {name: (self._start[name] - ends[name]) / travel - self._server[name] for name in ends}
        return {name: self._own[name] + change[name] for name in change}, change
