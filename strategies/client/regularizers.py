"""Terms that tie local training to the server's model: FedProx's and FedDyn's.

Papers: FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
    https://arxiv.org/abs/1812.06127. FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated
    Learning Based on Dynamic Regularization, ICLR 2021, https://arxiv.org/abs/2111.04263.
Symbols: mu -> mu; alpha -> alpha; FedDyn's gradient memory -grad L_k(theta_k) / alpha is kept as h_k, in units of
    weights, so that the sum of the ways of all rounds is it: h_k += w_k - w.
Deviations: both terms are part of the loss, so clipping acts on them and the gradient together, and the optimiser's
    weight decay is beside them; published code of FedDyn has alpha / 2 ||w||^2 in the weight decay, where clipping
    leaves it alone. FedDyn's term is written around the start, without the constant alpha / 2 ||w_start||^2, which has
    no gradient and would drown the loss that is reported. alpha is one for all clients, as in the paper; the code of
    FedFTG divides it by a client's size over the mean size, which is the same where sizes are equal. Where they are
    not, one alpha leads to the optimum of the plain mean of the clients' objectives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .parameters import State, inner, kept_or_zero, parameters_of, squared_way


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
        return self._mu / 2 * squared_way(model, self._start)


class DynamicRegularizer:
    """FedDyn: ``alpha <w, h_k - w_t> + alpha / 2 ||w||^2`` is added to the loss; its Algorithm 1, in the terms of h_k.

    Where local training has come to rest, the gradient of the client's own loss is ``-alpha`` times the new h_k.

    Args:
        model: It holds w_t, which local training starts from.
        alpha: Above 0.
        drift: h_k; empty for a client that has none yet: zeros.
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
            model: It holds w_k.
        """
        ends = parameters_of(model)
        return {name: self._drift[name] + (ends[name] - self._start[name]) for name in ends}
