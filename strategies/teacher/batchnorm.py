"""Batch-normalisation statistics of frozen members as a loss on the images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.seeds import build_module
from ..core.shards import HeldMembers
from ..method import Job, Progress
from .calls import running_again
from .sharded import STATISTICS


class BatchNormLoss:
    """L_BN of the last forward pass through some members; call it to read the loss.

    l_BN of DENSE ("stability"): ``(1/M) sum_k sum_l ( ||mu_l(x) - mu_{k,l}||_2 + ||var_l(x) - var_{k,l}||_2 )``. Here
    mu_l and var_l (biased) are batch statistics of the input of member k's normalisation layer l; mu_{k,l} and
    var_{k,l} are its running statistics. The norms are over channels and not squared.

    Args:
        members: The M members; those without batch normalisation add zero.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        members = list(members)
        layers = [layer for member in members for layer in member.modules() if isinstance(layer, _BatchNorm)]
        self._terms: list[Tensor] = []
        self._count = len(members)
        self._hooks = [layer.register_forward_pre_hook(self._collect) for layer in layers if layer.track_running_stats]
        if self._hooks:
            self._hooks.append(members[0].register_forward_pre_hook(self._begin))

    def __call__(self) -> Tensor:
        """Return the loss, a scalar, and clear the collected terms."""
        terms, self._terms = self._terms, []
        return torch.stack(terms).sum() / self._count if terms else torch.zeros(())

    def remove(self) -> None:
        """Remove the hooks from the members."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        """Drop the terms of a pass that ended early, as one that a graph could not capture."""
        if torch.is_grad_enabled() and not running_again():
            self._terms = []

    def _collect(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            distance = statistics_distance(inputs[0], layer.running_mean, layer.running_var)  # type: ignore[arg-type]
            if not running_again():
                self._terms.append(distance)


@contextmanager
def batchnorm_loss(members: Iterable[nn.Module] | HeldMembers) -> Iterator[Callable[[], Tensor]]:
    """Collect the members' batch-normalisation loss during a block; its end removes the hooks.

    Yields:
        A callable that returns the loss, like :class:`BatchNormLoss`.
    """
    if isinstance(members, HeldMembers):
        with members.watched(STATISTICS) as seen:
            count = len(members)
            yield lambda: _total(seen(), count)
        return
    loss = BatchNormLoss(members)
    try:
        yield loss
    finally:
        loss.remove()


def _total(sums: Iterable[Tensor | None], count: int) -> Tensor:
    found = [each for each in sums if each is not None]
    return torch.stack(found).sum() / count if found else torch.zeros(())


def note_without_statistics(members: Iterable[nn.Module] | HeldMembers, progress: Progress) -> None:
    """Record a note if no member keeps batch-normalisation statistics: the loss is then zero."""
    if not keeps_statistics(members):
        progress.record({"note": "no client's model keeps batch-normalisation statistics: that loss is zero"})


def reads_statistics(job: Job, weight: float) -> bool:
    """Return whether L_BN of this weight reads layers of the uploads; without it they may be rewritten to be faster."""
    kinds = dict.fromkeys(upload.architecture for upload in job.uploads)
    return bool(weight) and keeps_statistics(build_module(job.builders[kind]) for kind in kinds)


def keeps_statistics(members: Iterable[nn.Module] | HeldMembers) -> bool:
    """Return whether any member keeps batch-normalisation statistics."""
    if isinstance(members, HeldMembers):
        return members.statistics
    layers = (layer for member in members for layer in member.modules() if isinstance(layer, _BatchNorm))
    return any(layer.track_running_stats for layer in layers)


def statistics_distance(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return ``||mu(x) - mean||_2 + ||var(x) - var||_2``, one layer's part of l_BN of DENSE.

    Args:
        x: The layer's input [B, ch, ...]; mu and the biased var are over all but the channels.
        mean: The layer's running mean [ch].
        var: The layer's running variance [ch].
    """
    x = x.to(torch.promote_types(x.dtype, mean.dtype))  # the 8-bit mantissa of bfloat16 is too short for a variance
    batch_var, batch_mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    distance: Tensor = torch.linalg.vector_norm(batch_mean - mean) + torch.linalg.vector_norm(batch_var - var)
    return distance
