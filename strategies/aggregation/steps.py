"""The steps of one trainer in one round of FENS, for every form of aggregator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..combiners.aggregators import AGGREGATORS, TORCH_ONLY, check_params
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

    Raises:
        KeyError: There is no such aggregator.
        OptionError: It has a gate, and the inputs are no images.
        ValueError: It is not trained, its parameters do not fit the logits, or there are no examples.
    """
    check_params(_expected(aggregator, params, inputs, logits), params)
    if aggregator in TORCH_ONLY:
        from .gate_steps import gate_steps

        return gate_steps(params, inputs=inputs, logits=logits, labels=labels, sgd=sgd, seed=seed)
    return local_steps(aggregator, params, logits=logits, labels=labels, sgd=sgd, seed=seed)


def units(params: Mapping[str, np.ndarray[Any, Any]]) -> int:
    """Return the hidden units k of an aggregator's parameters; 0 if they have no hidden layer."""
    return params["bias1"].size if "bias1" in params else 0


def _expected(
    aggregator: str,
    given: Mapping[str, np.ndarray[Any, Any]],
    inputs: np.ndarray[Any, Any],
    logits: np.ndarray[Any, Any],
) -> Params:
    """Return parameters of the names and shapes that fit the logits; hidden units and the gate's form are as given."""
    entry, (members, _, classes) = AGGREGATORS[aggregator], logits.shape
    if entry.kind == "trained":
        return entry.start(None, members=members, classes=classes, hidden=units(given))
    if entry.kind != "torch":
        raise ValueError("it is not trained by gradients")
    from ..combiners.gate import start_gate

    per_class = "layer3_bias" in given and given["layer3_bias"].size == members * classes
    return start_gate(None, members=members, classes=classes, input_shape=inputs.shape[1:], per_class=per_class)
