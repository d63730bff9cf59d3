"""Terms that tie local training to the server's model: FedProx's and FedDyn's.

Papers: FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
    https://arxiv.org/abs/1812.06127. FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated
    Learning Based on Dynamic Regularization, ICLR 2021, https://arxiv.org/abs/2111.04263.
Symbols: mu -> mu; alpha -> alpha; FedDyn's gradient memory -grad L_k(theta_k) / alpha -> h_k, in units of weights:
    h_k += w_k - w in every round.
Deviations: both terms are part of the loss. Clipping acts on them and the gradient together, and the optimiser's
    weight decay adds to them. Published code of FedDyn has alpha / 2 ||w||^2 in the weight decay, outside the clipping.
    FedDyn's term is written around the start, without the constant alpha / 2 ||w_start||^2: the constant has no
    gradient and would drown the reported loss. alpha is the same for all clients, as in the paper; the code of FedFTG
    divides it by the client's size over the mean size, which is equal for clients of equal size. For clients of unequal
    size, one alpha leads to the optimum of the plain mean of the clients' objectives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .parameters import State, inner, kept_or_zero, parameters_of, squared_way


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
        return self._mu / 2 * squared_way(model, self._start)


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
        self._drift = kept_or_zero(drift, self._start)

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return the term up to a constant, a scalar; its gradient is ``alpha (h_k + w - w_t)``."""
        return self._alpha * (inner(model, self._drift) + squared_way(model, self._start) / 2)

    def finish(self, model: nn.Module) -> State:
        """Return the next ``h_k``, ``h_k + w_k - w_t``.

        Args:
            model: Holds w_k.
        """
        ends = parameters_of(model)
        return {name: self._drift[name] + (ends[name] - self._start[name]) for name in ends}
