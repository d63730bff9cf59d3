"""The steps of one client in one round: plain SGD on an aggregator, on cached logits, in numpy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..combiners.aggregators import AGGREGATORS
from ..core.seeds import derive_seed

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sgd:
    """The schedule of a client's steps.

    Attributes:
        steps: K per round, from 1.
        batch_size: B examples per step, from 1.
        lr: The learning rate eta_l; there is no momentum and no weight decay.
    """

    steps: int
    batch_size: int
    lr: float

    def seen(self, count: int) -> int:
        """Return ``min(n_i, K B)``, the number of examples that a client sees in a round: the weight of its update."""
        return min(count, self.steps * self.batch_size)

    def batches(self, count: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the examples of each of K steps: shuffled, without replacement, reshuffled after each epoch.

        The last batch of an epoch holds the remainder, so that it can be smaller.

        Args:
            count: n_i, from 1.
            seed: Of this client and round.
        """
        rng = np.random.default_rng(derive_seed(seed, "batches"))
        per_epoch = -(-count // self.batch_size)
        for step in range(self.steps):
            if step % per_epoch == 0:
                order = rng.permutation(count)
            first = step % per_epoch * self.batch_size
            yield order[first : first + self.batch_size]


def local_steps(
    aggregator: str, params: Mapping[str, Array], *, logits: Array, labels: Array, sgd: Sgd, seed: int
) -> dict[str, Array]:
    """Return the parameters after K steps ``lambda_i <- lambda_i - eta_l grad CE(agg(lambda_i, Z), y)``.

    Allouah et al., NeurIPS 2024, Algorithm 1, the clients' part of phase 2.

    Args:
        aggregator: The name of an aggregator that is trained in numpy.
        params: lambda, float32; not changed.
        logits: Z, of every member on every held example, float32 [M, n_i, C].
        labels: y, int64 [n_i], in [0, C).
        sgd: K, B and eta_l.
        seed: Of this client and round.

    Raises:
        KeyError: There is no such aggregator.
        ValueError: There are no examples, or the aggregator is not trained in numpy.
    """
    if len(labels) == 0:
        raise ValueError("no examples to train the aggregator on")
    trained, lr = dict(params), np.float32(sgd.lr)
    for batch in sgd.batches(len(labels), seed):
        _, gradients = AGGREGATORS[aggregator].gradient(trained, logits[:, batch], labels[batch])
        trained = {name: value - lr * gradients[name] for name, value in trained.items()}
    return trained
