"""The members of an ensemble where they do not fit one device: in shards, each with some of them.

A step sends images out and gets logits back; the backward pass sends the gradients of the logits out and gets those of
the images back. All shards are started before any is waited for. What a shard is made of is :mod:`.shard`; that one may
be in another process is not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# What a shard may be asked for beside the logits.
NOTHING = ""
STATISTICS = "statistics"
FEATURES = "features"


@dataclass(frozen=True)
class Request:
    """What one forward pass asks of a shard.

    Attributes:
        first: The shard's first member that is asked.
        last: The one after the last.
        watch: ``""``; ``"statistics"``: the batch-normalisation terms too; ``"features"``: the penultimate features.
        ticket: Greater than 0: a backward pass may come under this number; 0: none will.
    """

    first: int
    last: int
    watch: str = NOTHING
    ticket: int = 0


@dataclass(frozen=True)
class Answer:
    """What a shard answers.

    Attributes:
        logits: Of the members that were asked [m, B, C], float32.
        watched: The sum over them of the batch-normalisation terms [], or of the features [B, F]; None if nothing was
            asked for, or if the members' features differ in length.
    """

    logits: Array
    watched: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.logits.nbytes + (0 if self.watched is None else self.watched.nbytes)


class Shard(Protocol):
    """Some members, wherever they are. Both calls start the work; what they return waits for it."""

    def forward(self, images: Any, request: Request) -> Callable[[], Answer]:
        """Start a forward pass.

        Args:
            images: Normalised images [B, ch, H, W], as ``share`` of :class:`ShardedMembers` returned them.
            request: What is asked.
        """

    def backward(self, ticket: int, logits: Array, watched: Array | None) -> Callable[[], Array | None]:
        """Start the backward pass of a forward pass.

        Args:
            ticket: Its number.
            logits: The gradient of the logits [m, B, C].
            watched: That of what was watched; None without it.

        Returns:
            What waits for the gradient of the images; None if the shard no longer has that forward pass.
        """


@dataclass(frozen=True)
class Part:
    """A shard and what is known of its members.

    Attributes:
        shard: The shard.
        members: How many it has.
        statistics: Whether one of them keeps batch-normalisation statistics.
    """

    shard: Shard
    members: int
    statistics: bool = False


class ShardedMembers:
    """M frozen members in shards, in the order of the shards; what :class:`.ensemble.Ensemble` asks of its members.

    Args:
        parts: The shards.
        share: Makes an array ready to be sent to all shards at once.

    Attributes:
        statistics: Whether a member keeps batch-normalisation statistics.
        moved: Bytes of the arrays that went to the shards and came from them so far.
    """

    def __init__(self, parts: Sequence[Part], share: Callable[[Array], Any] = lambda array: array) -> None:
        self._parts, self._share = tuple(parts), share
        self.statistics = any(part.statistics for part in parts)
        self.moved = 0
        self._tickets = itertools.count(1)
        self._watch, self._seen = NOTHING, list[Tensor | None]()

    def __len__(self) -> int:
        """Return M."""
        return sum(part.members for part in self._parts)

    def logits(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Return the logits [m, B, C] for normalised images [B, ch, H, W]; gradients reach the images.

        Args:
            x: The images.
            part: Which of the members; None for all.
        """
        watch = self._watch if torch.is_grad_enabled() or self._watch == FEATURES else NOTHING
        asked = self._asked(part or slice(0, len(self)), watch)
        # Without gradients no shard need keep a graph, whatever made the images.
        images = x if torch.is_grad_enabled() else x.detach()
        logits, watched = _Pass.apply(images, self, asked)  # type: ignore[no-untyped-call]
        if watch:
            self._seen.append(watched if watched.numel() else None)
        found: Tensor = logits
        return found

    @contextmanager
    def watched(self, what: str) -> Iterator[Callable[[], list[Tensor | None]]]:
        """Have the shards look at their members' layers during a block.

        Args:
            what: ``"statistics"`` or ``"features"``, see :class:`Request`.

        Yields:
            A callable that returns what was seen since its last call, the sum over all members for each forward pass.
        """

        def seen() -> list[Tensor | None]:
            found, self._seen = self._seen, []
            return found

        before, self._watch = self._watch, what
        try:
            yield seen
        finally:
            self._watch, self._seen = before, []

    def _asked(self, part: slice, watch: str) -> list[tuple[Shard, Request]]:
        found, begin = [], 0
        for each in self._parts:
            first, last = max(part.start - begin, 0), min(part.stop - begin, each.members)
            if first < last:
                found.append((each.shard, Request(first, last, watch)))
            begin += each.members
        return found

    def forward(self, x: Tensor, asked: Sequence[tuple[Shard, Request]]) -> list[Answer]:
        """Make a forward pass through the shards; called by autograd."""
        array = _array(x)
        images = self._share(array)
        waiting = [shard.forward(images, request) for shard, request in asked]
        answers = [wait() for wait in waiting]
        self.moved += len(asked) * array.nbytes + sum(answer.nbytes for answer in answers)
        return answers

    def backward(
        self,
        x: Tensor,
        asked: Sequence[tuple[Shard, Request]],
        gradients: Sequence[tuple[Array, Array | None]],
    ) -> Tensor:
        """Return the gradient of the images, the sum over the shards; called by autograd."""
        waiting = [
            shard.backward(request.ticket, *gradient)
            for (shard, request), gradient in zip(asked, gradients, strict=True)
        ]
        found = [wait() for wait in waiting]
        gone = [number for number, gradient in enumerate(found) if gradient is None]
        if gone:  # another forward pass came between, or the shard's process is another one
            self.forward(x, [asked[number] for number in gone])
            again = [asked[number][0].backward(asked[number][1].ticket, *gradients[number]) for number in gone]
            for number, wait in zip(gone, again, strict=True):
                found[number] = wait()
        whole = torch.zeros(x.shape)
        # The last member's first, as autograd has it; within a shard they are added already, so the last bits differ.
        for gradient in reversed(found):
            if gradient is None:
                raise RuntimeError("a shard lost a forward pass that it had just made")
            whole += torch.tensor(gradient)
            self.moved += gradient.nbytes
        self.moved += sum(logits.nbytes for logits, _ in gradients)
        return whole.to(x.device, x.dtype)

    def tickets(self, asked: Sequence[tuple[Shard, Request]]) -> list[tuple[Shard, Request]]:
        """Return the same requests under the number of a new forward pass that a backward pass may follow."""
        ticket = next(self._tickets)
        return [(shard, Request(request.first, request.last, request.watch, ticket)) for shard, request in asked]


class _Pass(torch.autograd.Function):
    """A forward and a backward pass through all shards: images -> logits, and the sum of what was watched."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, members: ShardedMembers, asked: Sequence[tuple[Shard, Request]]
    ) -> tuple[Tensor, Tensor]:
        if ctx.needs_input_grad[0]:
            asked = members.tickets(asked)
            ctx.save_for_backward(x)
            ctx.members, ctx.asked = members, asked
        answers = members.forward(x, asked)
        ctx.sizes = [len(answer.logits) for answer in answers]
        logits = torch.from_numpy(np.concatenate([answer.logits for answer in answers]))
        watched = _summed([answer.watched for answer in answers])
        if not watched.numel():
            ctx.mark_non_differentiable(watched)
        ctx.watched = bool(watched.numel())
        return logits.to(x.device), watched.to(x.device)

    @staticmethod
    def backward(ctx: Any, logits: Tensor, watched: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        of_watched = _array(watched) if ctx.watched else None
        gradients = [(part, of_watched) for part in map(_array, torch.split(logits, ctx.sizes))]
        return ctx.members.backward(x, ctx.asked, gradients), None, None


def _summed(parts: Sequence[Array | None]) -> Tensor:
    """Return the sum of what all shards watched; an empty tensor if one has nothing or their shapes differ."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part.shape for part in found}) != 1:
        return torch.zeros(0)
    return torch.from_numpy(np.stack(found)).sum(0)


def _array(tensor: Tensor) -> Array:
    plain = tensor.detach().to("cpu")
    array: Array = (plain.float() if plain.dtype == torch.bfloat16 else plain).contiguous().numpy()
    return array
