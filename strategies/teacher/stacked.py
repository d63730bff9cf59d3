"""Members of one architecture as one batched model, for devices where launching small kernels takes most of the time.

On a CPU it is slower than one member after another; on a GPU it has not been measured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


class StackedMembers:
    """Some members of one architecture, called together.

    Their weights move into stacked tensors and the members keep views, so that memory holds each weight once.

    Args:
        members: m modules [B, ch, H, W] -> [B, C] that differ only in the values of their weights.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._skeleton = copy.deepcopy(members[0]).to("meta")
        states = [dict([*member.named_parameters(), *member.named_buffers()]) for member in members]
        self._state = {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}
        for name, stack in self._state.items():
            for state, values in zip(states, stack, strict=True):
                state[name].data = values

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits [m, B, C] for images [B, ch, H, W]."""

        def one(state: dict[str, Tensor]) -> Tensor:
            logits: Tensor = functional_call(self._skeleton, state, (x,))
            return logits

        logits: Tensor = vmap(one)(self._state)
        return logits


def stacks(members: Sequence[nn.Module], kinds: Sequence[str], most: int) -> list[tuple[list[int], StackedMembers]]:
    """Group members by kind, and stack groups of at most ``most`` members.

    Args:
        members: The M members.
        kinds: The kind of each member [M]; members of one kind differ only in the values of their weights.
        most: Largest number of members in a stack.

    Returns:
        The indices of each stack's members, and the stack.
    """
    found = []
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        for part in (numbers[start : start + most] for start in range(0, len(numbers), most)):
            found.append((part, StackedMembers([members[number] for number in part])))
    return found
