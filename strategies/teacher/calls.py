"""How the members of an ensemble are called: one after another, or several of one architecture together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from .grouped import NarrowMembers, StackedMembers, narrow_layer, stackable

# Number of members whose activations are kept for the backward pass; those of the others are recomputed.
KEPT = 10

_RUNNING_AGAIN = ContextVar("running_again", default=False)

# Numbers of some members, and what returns their logits [m, B, C] for images [B, ch, H, W].
Call = tuple[Sequence[int], Callable[[Tensor], Tensor]]


def one_by_one(members: Sequence[nn.Module]) -> list[Call]:
    """Return a call for every member."""
    return [_alone(number, member) for number, member in enumerate(members)]


def together(members: Sequence[nn.Module], kinds: Sequence[str], *, stack: bool) -> list[Call]:
    """Return the calls that take the least time, each of at most :data:`KEPT` members.

    Args:
        members: The M members.
        kinds: The kind of each member [M]; members of one kind differ only in the values of their weights.
        stack: Stacks members of one kind that are :func:`.grouped.stackable`, and calls others one by one. Without it
            they share a narrow first layer if they have one, and are called one by one if not: on a CPU that beats
            every stacked form.
    """
    calls: list[Call] = []
    for numbers in _of_one_kind(kinds):
        group = [members[number] for number in numbers]
        traced = [member for member in group if isinstance(member, fx.GraphModule)]
        if stack and stackable(group[0]):
            calls.append((numbers, StackedMembers(group)))
        elif not stack and len(traced) == len(group) > 1 and all(map(narrow_layer, traced)):
            calls.append((numbers, NarrowMembers(traced)))
        else:
            calls += [_alone(number, members[number]) for number in numbers]
    return calls


def evaluated(calls: Sequence[Call], x: Tensor) -> Tensor:
    """Return all members' logits [M, B, C], in the order of their numbers.

    If a gradient is to flow to x, the first :data:`KEPT` members keep their activations.
    """
    backward = torch.is_grad_enabled() and x.requires_grad
    rows: dict[int, Tensor] = {}
    for numbers, call in calls:
        found = recomputed(call, x) if backward and len(rows) + len(numbers) > KEPT else call(x)
        rows.update(zip(numbers, found.unbind(), strict=True))
    return torch.stack([rows[number] for number in range(len(rows))])


def recomputed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``forward(x)``, keeping only x for the backward pass.

    Values and gradients equal those of a plain call bit for bit. Hooks inside ``forward`` run twice; the second time
    :func:`running_again` is true.
    """
    result: Tensor = checkpoint(forward, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _second_run()))
    return result


def running_again() -> bool:
    """Return whether this is the second run of a :func:`recomputed` forward pass, whose results are discarded.

    In the second run a hook must repeat the differentiable arithmetic of the first, but store nothing.
    """
    return _RUNNING_AGAIN.get()


def _of_one_kind(kinds: Sequence[str]) -> Iterator[list[int]]:
    """Yield the numbers of members of one kind, at most :data:`KEPT` at a time."""
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        yield from (numbers[start : start + KEPT] for start in range(0, len(numbers), KEPT))


def _alone(number: int, member: nn.Module) -> Call:
    return [number], partial(_as_group, member)


def _as_group(member: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = member(x)
    return logits.unsqueeze(0)


@contextmanager
def _second_run() -> Iterator[None]:
    token = _RUNNING_AGAIN.set(True)
    try:
        yield
    finally:
        _RUNNING_AGAIN.reset(token)
