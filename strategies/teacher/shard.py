"""One shard: some members, the passes through them, and the one graph that a backward pass may need."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..core.processor import flush_subnormals
from ..method import ModelBuilder, Upload
from .batchnorm import BatchNormLoss, keeps_statistics
from .ensemble import Ensemble, MemberLoader
from .heads import penultimate_features
from .sharded import FEATURES, NOTHING, STATISTICS, Array, ShardAnswer, ShardRequest


class HeldShard:
    """Some members in this process, and the graph of the last forward pass that had a ticket.

    Memory is bounded because only one graph is kept. A forward pass whose backward pass never comes is dropped at the
    next one; a forward pass whose backward pass comes too late is repeated by the caller.
    """

    def __init__(self, builders: Mapping[str, ModelBuilder], *, device: str, fold: bool, precision: str) -> None:
        self._loader: MemberLoader | None = MemberLoader(builders, device=device, fold=fold, precision=precision)
        self._device = device
        self._ensemble: Ensemble | None = None
        self._members: list[nn.Module] = []
        self._kept: tuple[int, Tensor, Tensor, Tensor | None, ExitStack] | None = None

    def add(self, upload: Upload) -> None:
        """Load one more member; only the upload's weights are kept, in their module.

        Raises:
            UploadError: Its weights do not fit its architecture.
        """
        if self._loader is None:
            raise RuntimeError("a shard takes no more members once it is closed")
        self._loader.add(upload)

    def close(self) -> bool:
        """Take no more members; return whether any of them keeps batch-normalisation statistics."""
        if self._loader is not None:
            self._members = self._loader.members
            self._ensemble, self._loader = self._loader.ensemble(nn.Identity()), None
        return keeps_statistics(self._members)

    @flush_subnormals()
    def forward(self, images: Array, request: ShardRequest) -> ShardAnswer:
        """Run a forward pass, see :class:`.sharded.Shard`."""
        x = torch.tensor(images).to(self._device)
        keep = request.ticket > 0
        if keep:
            self._drop()  # before the next graph is made: memory holds one at most
        x.requires_grad_(keep)
        part = slice(request.first, request.last)
        with ExitStack() as hooks:
            with torch.set_grad_enabled(keep or request.watch == STATISTICS):
                logits, watched = self._pass(x, part, request.watch, hooks)
            if keep:  # with the hooks, because the backward pass runs some members again
                self._kept = (request.ticket, x, logits, watched, hooks.pop_all())
        return ShardAnswer(_array(logits), None if watched is None else _array(watched))

    @flush_subnormals()
    def backward(self, ticket: int, logits: Array, watched: Array | None) -> Array | None:
        """Run the backward pass of the forward pass with this ticket and drop its graph; None if it is not kept."""
        if self._kept is None or self._kept[0] != ticket:
            return None
        (_, x, of_members, seen, hooks), self._kept = self._kept, None
        with hooks:
            pairs = [
                (output, torch.tensor(gradient).to(self._device))
                for output, gradient in zip((of_members, seen), (logits, watched), strict=True)
                if output is not None and gradient is not None and output.requires_grad
            ]
            if not pairs:
                return _array(torch.zeros_like(x))
            (found,) = torch.autograd.grad(
                [output for output, _ in pairs], x, [gradient for _, gradient in pairs], allow_unused=True
            )
        return _array(torch.zeros_like(x) if found is None else found)

    def _drop(self) -> None:
        """Drop the kept graph and its hooks."""
        if self._kept is not None:
            self._kept[-1].close()
        self._kept = None

    def _pass(self, x: Tensor, part: slice, watch: str, hooks: ExitStack) -> tuple[Tensor, Tensor | None]:
        if self._ensemble is None:
            raise RuntimeError("a shard must be closed before its first pass")
        some = self._members[part]
        if watch == STATISTICS:
            loss = BatchNormLoss(some)
            hooks.callback(loss.remove)
        features = hooks.enter_context(penultimate_features(some)) if watch == FEATURES else None
        logits = self._ensemble.member_logits(x, None if len(some) == len(self._members) else part)
        if watch == NOTHING:
            return logits, None
        if watch == STATISTICS:
            return logits, loss().to(x.device) * len(some)
        mean = features() if features is not None else None
        return logits, None if mean is None else mean * len(some)


def divide_evenly(count: int, shards: int) -> list[slice]:
    """Divide members among shards: in order, with sizes that differ by at most one, no shard empty.

    Args:
        count: M.
        shards: At least 1; at most M are used.
    """
    shards = min(count, shards)
    borders = [number * count // shards for number in range(shards + 1)] if shards else [0]
    return [slice(first, last) for first, last in pairwise(borders)]


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().float().cpu().contiguous().numpy()
    return array
