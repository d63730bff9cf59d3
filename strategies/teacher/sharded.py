"""An ensemble's members in shards, for ensembles that do not fit on one device.

The forward pass sends images out and gets logits back. The backward pass sends the gradients by the logits out and gets
those by the images back. All shards are started before the first is waited for. :mod:`.shard` implements a shard; this
module does not depend on the process that it runs in.
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

# Outputs of a shard besides the logits.
NOTHING = ""
STATISTICS = "statistics"
FEATURES = "features"


@dataclass(frozen=True)
class ShardRequest:
    """The members and the outputs that one forward pass requests of a shard.

    Attributes:
        first: The first of the shard's members to evaluate.
        watch: ``""`` for logits alone; ``"statistics"`` adds the batch-normalisation terms, ``"features"`` the
            penultimate features.
        ticket: Above 0: the number of a backward pass that may follow; 0: none follows.
    """

    first: int
    last: int
    watch: str = NOTHING
    ticket: int = 0


@dataclass(frozen=True)
class ShardAnswer:
    """A shard's answer to a request.

    Attributes:
        logits: Of the requested members [m, B, C], float32.
        watched: Over these members, the sum of the batch-normalisation terms [] or of the features [B, F]. None if
            neither was requested, or if the members' features differ in length.
    """

    logits: Array
    watched: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.logits.nbytes + (0 if self.watched is None else self.watched.nbytes)


class Shard(Protocol):
    """Some members, in any process. Both calls start the work and return a callable that waits for its result."""

    def forward(self, images: Any, request: ShardRequest) -> Callable[[], ShardAnswer]:
        """Start a forward pass.

        Args:
            images: Normalised images [B, ch, H, W], as ``share`` of :class:`ShardedMembers` returned them.
        """

    def backward(self, ticket: int, logits: Array, watched: Array | None) -> Callable[[], Array | None]:
        """Start the backward pass of a forward pass.

        Args:
            logits: The gradient by the logits [m, B, C].
            watched: The gradient by the watched sum; None without one.

        Returns:
            A callable that waits for the gradient by the images. It returns None if the shard no longer has that
            forward pass.
        """


@dataclass(frozen=True)
class LoadedShard:
    """A shard and facts about its members.

    Attributes:
        statistics: Whether any of them keeps batch-normalisation statistics.
    """

    shard: Shard
    members: int
    statistics: bool = False


class ShardedMembers:
    """M frozen members in shards, in the shards' order, with the interface that :class:`.ensemble.Ensemble` needs.

    Args:
        share: Prepares an array for sending it to all shards.

    Attributes:
        statistics: Whether any member keeps batch-normalisation statistics.
        moved: Bytes of all arrays sent to the shards and received from them so far.
    """

    def __init__(self, parts: Sequence[LoadedShard], share: Callable[[Array], Any] = lambda array: array) -> None:
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
            part: The members to evaluate; None for all.
        """
        watch = self._watch if torch.is_grad_enabled() or self._watch == FEATURES else NOTHING
        asked = self._asked(part or slice(0, len(self)), watch)
        # Without gradients no shard keeps a graph, even if the images have one.
        images = x if torch.is_grad_enabled() else x.detach()
        logits, watched = _Pass.apply(images, self, asked)  # type: ignore[no-untyped-call]
        if watch:
            self._seen.append(watched if watched.numel() else None)
        found: Tensor = logits
        return found

    @contextmanager
    def watched(self, what: str) -> Iterator[Callable[[], list[Tensor | None]]]:
        """Have the shards watch their members' layers during a block.

        Args:
            what: ``"statistics"`` or ``"features"``, see :class:`ShardRequest`.

        Yields:
            A callable that returns the sum over all members for each forward pass since its last call.
        """

        def seen() -> list[Tensor | None]:
            found, self._seen = self._seen, []
            return found

        before, self._watch = self._watch, what
        try:
            yield seen
        finally:
            self._watch, self._seen = before, []

    def _asked(self, part: slice, watch: str) -> list[tuple[Shard, ShardRequest]]:
        found, begin = [], 0
        for each in self._parts:
            first, last = max(part.start - begin, 0), min(part.stop - begin, each.members)
            if first < last:
                found.append((each.shard, ShardRequest(first, last, watch)))
            begin += each.members
        return found

    def forward(self, x: Tensor, asked: Sequence[tuple[Shard, ShardRequest]]) -> list[ShardAnswer]:
        """Run a forward pass through the shards; called by autograd."""
        array = _array(x)
        images = self._share(array)
        waiting = [shard.forward(images, request) for shard, request in asked]
        answers = [wait() for wait in waiting]
        self.moved += len(asked) * array.nbytes + sum(answer.nbytes for answer in answers)
        return answers

    def backward(
        self,
        x: Tensor,
        asked: Sequence[tuple[Shard, ShardRequest]],
        gradients: Sequence[tuple[Array, Array | None]],
    ) -> Tensor:
        """Return the gradient by the images, the sum over the shards; called by autograd."""
        waiting = [
            shard.backward(request.ticket, *gradient)
            for (shard, request), gradient in zip(asked, gradients, strict=True)
        ]
        found = [wait() for wait in waiting]
        gone = [number for number, gradient in enumerate(found) if gradient is None]
        if gone:  # another forward pass came between, or the shard's process was replaced
            self.forward(x, [asked[number] for number in gone])
            again = [asked[number][0].backward(asked[number][1].ticket, *gradients[number]) for number in gone]
            for number, wait in zip(gone, again, strict=True):
                found[number] = wait()
        whole = torch.zeros(x.shape)
        # Added from the last member to the first, as autograd does; sums within a shard make the last bits differ.
        for gradient in reversed(found):
            if gradient is None:
                raise RuntimeError("a shard lost a forward pass that it had just made")
            whole += torch.tensor(gradient)
            self.moved += gradient.nbytes
        self.moved += sum(logits.nbytes for logits, _ in gradients)
        return whole.to(x.device, x.dtype)

    def tickets(self, asked: Sequence[tuple[Shard, ShardRequest]]) -> list[tuple[Shard, ShardRequest]]:
        """Return the same requests with a new ticket, for a forward pass that a backward pass may follow."""
        ticket = next(self._tickets)
        return [(shard, ShardRequest(request.first, request.last, request.watch, ticket)) for shard, request in asked]


class _Pass(torch.autograd.Function):
    """A forward and a backward pass through all shards: images -> logits and the watched sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, members: ShardedMembers, asked: Sequence[tuple[Shard, ShardRequest]]
    ) -> tuple[Tensor, Tensor]:
        if ctx.needs_input_grad[0]:
            asked = members.tickets(asked)
            ctx.save_for_backward(x)
            ctx.members, ctx.asked = members, asked
        answers = members.forward(x, asked)
        ctx.sizes = [len(answer.logits) for answer in answers]
        logits = torch.from_numpy(np.concatenate([answer.logits for answer in answers]))
        watched = _sum_watched([answer.watched for answer in answers])
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


def _sum_watched(parts: Sequence[Array | None]) -> Tensor:
    """Return the sum of the shards' watched values; an empty tensor if a shard has none or their shapes differ."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part.shape for part in found}) != 1:
        return torch.zeros(0)
    return torch.from_numpy(np.stack(found)).sum(0)


def _array(tensor: Tensor) -> Array:
    plain = tensor.detach().to("cpu")
    array: Array = (plain.float() if plain.dtype == torch.bfloat16 else plain).contiguous().numpy()
    return array
