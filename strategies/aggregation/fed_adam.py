"""FedAdam in the variant of FENS: the server's step on what the clients' local steps changed. Numpy alone.

Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2, https://arxiv.org/abs/2003.00295, as Allouah
et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, train their aggregators.

``flwr.serverapp.strategy.FedAdam`` is another variant. Delta, m, v, beta and tau are these, but its rate is
bias-corrected: in round t it is ``eta_s sqrt(1 - .99^(t+1)) / (1 - .9^(t+1))``, which is 0.74 eta_s in the first round,
0.47 eta_s about the twelfth, and within one per cent of eta_s only after 400, where most aggregators are done. It
weighs clients by a number that they report, not by what their steps saw. And it works on Flower's messages in its own
rounds; here the answers are arrays that were checked, and m and v go into the checkpoint of a run.
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
    """The server's optimiser; what it keeps between rounds is handed in and out.

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
        ``lambda <- lambda + eta_s m / (sqrt(v) + 1e-3)``; m and v start at zero and are not bias-corrected.

        Args:
            params: lambda, which every client started from.
            state: Of the last round, or :meth:`start`; not changed.
            updates: Of every client that answered: its lambda_i, and how many examples its steps saw
                (:meth:`.training.Sgd.seen`), which in proportion are r_i.

        Raises:
            ValueError: There are none, all weigh nothing, or one is not of this form or not finite.
        """
        for update, _ in updates:
            check_params(params, update)
        total = sum(weight for _, weight in updates)
        if not total > 0:
            raise ValueError(f"the weights of {len(updates)} updates sum to {total}: must be more than zero")
        moved: dict[str, Array] = {}
        kept: dict[str, Array] = {}
        for name, value in params.items():
            # In double precision, so that the order of clients does not show.
            start = value.astype(np.float64)
            delta = sum((weight * (update[name] - start) for update, weight in updates), np.zeros(())) / total
            m = self.beta_1 * state[f"m.{name}"] + (1 - self.beta_1) * delta
            v = self.beta_2 * state[f"v.{name}"] + (1 - self.beta_2) * delta**2
            moved[name] = (start + self.lr * m / (np.sqrt(v) + self.tau)).astype(value.dtype)
            kept |= {f"m.{name}": m.astype(value.dtype), f"v.{name}": v.astype(value.dtype)}
        return moved, kept
