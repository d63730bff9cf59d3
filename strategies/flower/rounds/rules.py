"""The rules by which a server combines the models of one round of federated learning, as pure functions.

Papers: FedNova: Wang, Liu, Liang, Joshi, Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020, https://arxiv.org/abs/2007.07481. SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich,
    Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
    https://arxiv.org/abs/1910.06378. FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated
    Learning Based on Dynamic Regularization, ICLR 2021, https://arxiv.org/abs/2111.04263.

Sums are in double precision and in the given order; models and control variates keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
        server_lr: The factor of the step.
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
