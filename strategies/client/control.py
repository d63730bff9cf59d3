"""SCAFFOLD's control variates on the client, and the length of the local steps, which FedNova uses too.

Paper: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning, ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1 with option II; FedNova: see
    :mod:`strategies.rounds.rules`.
Deviations: K eta_l is the distance that K steps move a weight whose gradient is 1. :class:`Travel` counts it for SGD
    with momentum too, so that the control variates stay mean gradients; without momentum it equals K eta_l. It uses the
    learning rates of the steps themselves, and starts at the server's model, refined or not. Published code of FedFTG
    takes the rate of the first round, and the model before its refinement. Weight decay is part of the gradients, and
    so of the control variates. Clipping acts on ``g - c_i + c``: the new control variate belongs to the clipped step.
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
    """The distance that SGD's steps move a weight whose gradient is always 1: eta ||a_i||_1 of FedNova.

    Plain SGD moves it by K eta in K steps. With momentum rho, a gradient also counts in all later steps.

    Attributes:
        momentum: rho, in [0, 1).
        length: The distance so far.
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
            raise UploadError("the server's control variate has other names or shapes than the model's parameters")
        self._server, self._own = beside(server, self._start), kept_or_zero(own, self._start)
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
            raise UploadError(f"the length of the local steps is {travel}: must be above 0, counted by step(lr)")
        ends = parameters_of(model)
        change = {name: (self._start[name] - ends[name]) / travel - self._server[name] for name in ends}
        return {name: self._own[name] + change[name] for name in change}, change
