"""The last linear layer of a model, which maps features to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.shards import HeldMembers
from .calls import running_again
from .sharded import FEATURES


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return a model's last linear layer [B, F] -> [B, C], in the order in which its layers are declared.

    Returns:
        The layer's name within the model, ``""`` if the model is the layer, and the layer itself, not a copy.

    Raises:
        OptionError: The model has no linear layer.
    """
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not found:
        raise OptionError(f"{type(model).__name__} has no linear layer: must end with one")
    return found[-1]


def head_keys(model: nn.Module, classes: int) -> tuple[str, str]:
    """Return the names of weight and bias of a model's last linear layer in its state dict.

    Args:
        classes: C, the outputs that it must have.

    Raises:
        OptionError: The model has no linear layer, its last one has not C outputs, or that layer stores no weight.
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
            f"the last linear layer of {type(model).__name__} computes its weight: must store it as a tensor"
        )
    return f"{prefix}weight", f"{prefix}bias"


def count_features(heads: Sequence[nn.Linear], classes: int, owners: Sequence[str]) -> int:
    """Return the number of features F that all the given last layers take.

    Args:
        classes: C, the outputs that each must have.
        owners: The names of the models they belong to, for the message.

    Raises:
        OptionError: A layer has not C outputs, or takes no float32, or the layers take different numbers of features.
    """
    for owner, head in zip(owners, heads, strict=True):
        kind = str(head.weight.dtype).removeprefix("torch.")
        if kind != "float32":  # in which features are generated
            raise OptionError(
                f"the last linear layer of {owner} has weights of {kind}: must be float32 at the level of features"
            )
    shapes = {(head.in_features, head.out_features) for head in heads}
    if len(shapes) != 1 or next(iter(shapes))[1] != classes:
        found = ", ".join(f"{o}: {h.in_features} to {h.out_features}" for o, h in zip(owners, heads, strict=True))
        raise OptionError(
            f"the models' last linear layers map features to outputs {found}: must take equal numbers of features "
            f"and have {classes} outputs, one per class"
        )
    return next(iter(shapes))[0]


# The penultimate features of frozen members: the inputs of their last linear layers.


@contextmanager
def penultimate_features(members: Iterable[nn.Module] | HeldMembers) -> Iterator[Callable[[], Tensor | None]]:
    """Watch the inputs of the members' last linear layers during a block.

    Yields:
        A callable that returns the mean of these inputs over the members [B, F] in the last forward pass. It returns
        None if a member has no linear layer or the members' features differ in length.
    """
    if isinstance(members, HeldMembers):
        with members.watched(FEATURES) as passes:
            count = len(members)
            yield lambda: _last_mean(passes(), count)
        return
    seen: dict[int, Tensor] = {}
    members = list(members)
    last = [([None] + [layer for layer in member.modules() if isinstance(layer, nn.Linear)])[-1] for member in members]

    def watch(member: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not running_again():
                seen[member] = inputs[0]

        return keep

    def mean() -> Tensor | None:
        if len(seen) < len(members) or len({tuple(features.shape) for features in seen.values()}) != 1:
            return None
        return torch.stack([seen[member] for member in range(len(members))]).mean(0)

    hooks = [layer.register_forward_pre_hook(watch(member)) for member, layer in enumerate(last) if layer is not None]
    try:
        yield mean
    finally:
        for hook in hooks:
            hook.remove()


def _last_mean(sums: list[Tensor | None], count: int) -> Tensor | None:
    last = sums[-1] if sums else None
    return None if last is None else last / count
