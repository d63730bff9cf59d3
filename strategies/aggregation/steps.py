"""The steps of one trainer in one round of FENS, for every form of aggregator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..combiners.aggregators import TORCH_ONLY
from .training import Sgd, local_steps

if TYPE_CHECKING:
    import numpy as np

    from ..combiners.forms import Params


def round_steps(
    aggregator: str,
    params: Mapping[str, np.ndarray[Any, Any]],
    *,
    inputs: np.ndarray[Any, Any],
    logits: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
    sgd: Sgd,
    seed: int,
) -> Params:
    """Return the parameters after the K steps of one trainer.

    Args:
        aggregator: The key in AGGREGATORS of a trained aggregator.
        params: lambda, float32.
        inputs: The members' input, float32 [n, ...]; only an aggregator with a gate reads it, and needs torch.
        logits: Of the members, float32 [M, n, C].
        labels: int64 [n].
        sgd: K, B and eta_l.
        seed: Of this trainer and round.
    """
    if aggregator in TORCH_ONLY:
        from .gate_steps import gate_steps

        return gate_steps(params, inputs=inputs, logits=logits, labels=labels, sgd=sgd, seed=seed)
    return local_steps(aggregator, params, logits=logits, labels=labels, sgd=sgd, seed=seed)
