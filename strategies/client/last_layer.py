"""A client's sums of the inputs of a model's last linear layer, of which the server solves that layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.layout import evaluating
from ..statistics.sums import Statistics, to_arrays
from ..teacher.heads import head_keys, last_linear

if TYPE_CHECKING:
    from ..core.facts import State


def sum_inputs(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> State:
    """Return the sums of the inputs of a model's last linear layer, as a client sends them.

    Args:
        model: Ends with a linear layer of C outputs; measured in eval mode, and left as it is.
        batches: Inputs of the model [B, ...], normalised, with labels [B].
        classes: C.

    Returns:
        ``counts`` int64 [C], ``sums`` float32 [C, d], ``gram`` float32 [d (d + 1) / 2].

    Raises:
        OptionError: The model has no such layer, or the layer is not called once per example.
    """
    head_keys(model, classes)
    layer, seen = last_linear(model)[1], list[Tensor]()
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    total = Statistics.zeros(classes, layer.in_features)
    try:
        with evaluating(model), torch.no_grad():
            for inputs, labels in batches:
                seen.clear()
                model(inputs)
                if [tuple(rows.shape) for rows in seen] != [(len(labels), layer.in_features)]:
                    raise OptionError(
                        f"the last linear layer of {type(model).__name__} gets inputs of shapes "
                        f"{[list(rows.shape) for rows in seen]} for {len(labels)} examples: must be "
                        f"{[len(labels), layer.in_features]}, once"
                    )
                total.include(seen[0].cpu(), labels)
    finally:
        hook.remove()
    return {**to_arrays(total), "counts": total.counts.long()}
