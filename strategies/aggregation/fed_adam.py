"""FedAdam in the variant of FENS: the server's step on the clients' parameter changes, in numpy alone.

Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2, https://arxiv.org/abs/2003.00295, as Allouah
et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, train their aggregators.

``flwr.serverapp.strategy.FedAdam`` is another variant. Delta, m, v, beta and tau are the same, but its rate is
bias-corrected: in round t it is ``eta_s sqrt(1 - .99^(t+1)) / (1 - .9^(t+1))``. That is 0.74 eta_s in the first round,
0.47 eta_s about the twelfth, and within one per cent of eta_s only after 400, when most aggregators are done.

Flower's variant weighs clients by a number that they report, not by the examples that their steps saw. It also works on
Flower's messages in its own rounds; here the answers are validated arrays, and m and v go into a run's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..combiners.aggregators import check_params

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FedAdam:
    """The server's optimiser; its state between rounds is passed in and returned.

    Attributes:
        lr: The server's learning rate eta_s.
        beta_1: Decay of the mean m.
        beta_2: Decay of the mean square v.
        tau: Added to the root of v.
    """

    lr: float
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def start(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state before the first round: ``m.<name>`` and ``v.<name>`` of every parameter, all zero."""
        return {f"{moment}.{name}": np.zeros_like(value) for moment in "mv" for name, value in params.items()}

    def step(
        self,
        params: Mapping[str, Array],
        state: Mapping[str, Array],
        updates: Sequence[tuple[Mapping[str, Array], float]],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the parameters and the state after a round.

        ``Delta = sum_i r_i (lambda_i - lambda)``, ``m <- .9 m + .1 Delta``, ``v <- .99 v + .01 Delta^2``,
        ``lambda <- lambda + eta_s m / (sqrt(v) + 1e-3)``. m and v start at zero and are not bias-corrected.

        Args:
            params: lambda, from which every client started.
            state: The state after the last round, or :meth:`start`; not changed.
            updates: Of every client that answered, its lambda_i and the number of examples that its steps saw
                (:meth:`.training.Sgd.seen`); these numbers, divided by their sum, are r_i.

        Raises:
            ValueError: There are no updates, their weights sum to 0, or one has another form or is not finite.
        """
        for update, _ in updates:
            check_params(params, update)
        total = sum(weight for _, weight in updates)
        if not total > 0:
            raise ValueError(f"the weights of {len(updates)} updates sum to {total}: must be greater than 0")
        moved: dict[str, Array] = {}
        kept: dict[str, Array] = {}
        for name, value in params.items():
            # In double precision, so that the order of clients does not change the result.
            start = value.astype(np.float64)
            delta = sum((weight * (update[name] - start) for update, weight in updates), np.zeros(())) / total
            m = self.beta_1 * state[f"m.{name}"] + (1 - self.beta_1) * delta
            v = self.beta_2 * state[f"v.{name}"] + (1 - self.beta_2) * delta**2
            moved[name] = (start + self.lr * m / (np.sqrt(v) + self.tau)).astype(value.dtype)
            kept |= {f"m.{name}": m.astype(value.dtype), f"v.{name}": v.astype(value.dtype)}
        return moved, kept
