"""The last layer of a model, which alone sees features and makes logits of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..core.errors import OptionError


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return a model's last linear layer [B, F] -> [B, C], in the order in which its layers are declared.

    Returns:
        Its name within the model, ``""`` for a model that is the layer, and the layer itself, not a copy.

    Raises:
        OptionError: The model has no linear layer.
    """
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not found:
        raise OptionError(f"{type(model).__name__} has no linear layer: must be models that end with one")
    return found[-1]


def head_keys(model: nn.Module, classes: int) -> tuple[str, str]:
    """Return the names of weight and bias of a model's last linear layer in its state dict.

    Args:
        model: Ends with a linear layer.
        classes: C, the outputs that it must have.

    Raises:
        OptionError: The model has no linear layer, or its last one has other outputs, or no weight of its own.
    """
    name, layer = last_linear(model)
    if layer.out_features != classes:
        raise OptionError(
            f"the last linear layer of {type(model).__name__} has {layer.out_features} outputs: must be {classes}, "
            "one per class"
        )
    prefix = f"{name}." if name else ""
    if f"{prefix}weight" not in model.state_dict():
        raise OptionError(
            f"the last linear layer of {type(model).__name__} makes its weight of others: must be one that is stored"
        )
    return f"{prefix}weight", f"{prefix}bias"


def features_of(heads: Sequence[nn.Linear], classes: int, owners: Sequence[str]) -> int:
    """Return how many features F all of some last layers take.

    Args:
        heads: Last layers.
        classes: C, the outputs that each must have.
        owners: Whose they are, for the message.

    Raises:
        OptionError: A layer has other outputs, or they take different numbers of features.
    """
    shapes = {(head.in_features, head.out_features) for head in heads}
    if len(shapes) != 1 or next(iter(shapes))[1] != classes:
        found = ", ".join(f"{o}: {h.in_features} to {h.out_features}" for o, h in zip(owners, heads, strict=True))
        raise OptionError(
            f"the models' last linear layers map features to outputs {found}: must be equal numbers of features, "
            f"and {classes} outputs, one per class"
        )
    return next(iter(shapes))[0]
