"""The choice of the examples that a client keeps from training, for the steps after its upload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.errors import OptionError
from ..core.seeds import derive_seed

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HoldoutRequest:
    """What the server's question says of the examples that the client held out of training.

    Attributes:
        run_id: The run of the ensemble's uploads.
        seed: The run's seed.
        share: Share of the client's examples that it held out.
        per_class: Whether it held out that share of every class.
        num_classes: C.
    """

    run_id: str
    seed: int
    share: float
    per_class: bool
    num_classes: int


def held_out(
    count: int,
    *,
    client: str,
    seed: int,
    share: float = 0.1,
    labels: npt.NDArray[np.integer] | None = None,
) -> tuple[Positions, Positions]:
    """Divide a client's examples: positions to train on, and positions to hold out; both ascending.

    Args:
        count: n, the client's examples.
        client: The client's name; equal names and seeds give equal parts.
        seed: The run's seed.
        share: Share of the examples to hold out, in [0, 1): ``int(share * n)`` examples.
        labels: The class of each example [n], to hold out the share of every class; None: of all examples together.

    Raises:
        OptionError: The share is out of range.
    """
    if not 0.0 <= share < 1.0:
        raise OptionError(f"the share of examples to keep is {share}: must be a number from 0, below 1")
    order = np.random.default_rng(derive_seed(seed, "holdout", client)).permutation(count)
    groups = [order] if labels is None else [order[labels[order] == kind] for kind in np.unique(labels)]
    kept = np.concatenate([group[: int(share * len(group))] for group in groups]) if count else order
    return np.setdiff1d(order, kept), np.sort(kept)
