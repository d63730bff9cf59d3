"""The penultimate features of frozen members: the inputs of their last linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.shards import HeldMembers
from .calls import running_again
from .sharded import FEATURES


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
