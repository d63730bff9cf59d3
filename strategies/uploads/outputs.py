"""Whether an upload's model answers with finite numbers: finite weights may overflow in the forward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.errors import UploadError
from ..core.facts import CVAE, REFUSALS, STATISTICS, kind_of
from ..core.seeds import generator, seeded_torch

if TYPE_CHECKING:
    from ..core.facts import State
    from ..method import ModelBuilder

PROBES = 4


def check_outputs(
    architecture: str,
    state: State,
    builder: ModelBuilder,
    input_shape: tuple[int, ...],
    *,
    num_examples: int | None = None,
) -> str:
    """Refuse a classifier whose outputs for ordinary inputs are not finite, and sums that no examples can have.

    Args:
        architecture: The key of the model, which tells its kind; a decoder takes no images and is not probed.
        state: Its weights, which fit the builder's model.
        builder: Builds the model.
        input_shape: Of one input; the probes are standard normal. A model that cannot take them is not judged.
        num_examples: The examples that the client tells of, which sums must be over; None if it tells none.

    Returns:
        A warning about an upload that is accepted; empty for none.

    Raises:
        UploadError: An output is infinite or no number, or sums break a bound.
    """
    if kind_of(architecture) == CVAE:
        return ""
    if kind_of(architecture) == STATISTICS:
        sums: Any = builder()
        return str(sums.check_upload(state, num_examples))  # sums of features know their own bounds
    with seeded_torch(0, "probe"):
        model = builder()
    check_answers(model, state, input_shape)
    return ""


def check_answers(model: nn.Module, state: State, input_shape: tuple[int, ...], most: float = math.inf) -> None:
    """Refuse weights with which a model's outputs for standard normal inputs are not finite, or too large.

    Args:
        model: Takes the weights, in place; one that cannot take the inputs is not judged.
        state: The weights.
        input_shape: Of one input.
        most: The largest size of an output.

    Raises:
        UploadError: An output is larger or no number.
    """
    probes = torch.randn(PROBES, *input_shape, generator=generator(0, "probe"))
    with seeded_torch(0, "probe"), torch.no_grad():
        model.load_state_dict(state)
        try:
            outputs = model.eval()(probes)
        except REFUSALS:  # a model of tokens, say
            return
    if isinstance(outputs, torch.Tensor) and not bool((outputs.isfinite() & (outputs.abs() <= most)).all()):
        largest = max((float(value.abs().max()) for value in state.values() if value.numel()), default=0.0)
        bound = "" if math.isinf(most) else f" whose outputs are at most {most:g}"
        raise UploadError(
            "arrays are finite, but the model's outputs for normal noise are not "
            f"(largest value {largest:.3g}): must be weights of a trained model{bound}"
        )
