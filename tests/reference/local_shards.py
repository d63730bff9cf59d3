"""Shards in this process, to compare with one ensemble: they compute when their result is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from strategies.teacher.shard import HeldShard, divide_evenly
from strategies.teacher.sharded import Array, LoadedShard, Shard, ShardAnswer, ShardRequest

if TYPE_CHECKING:
    from strategies.method import ModelBuilder, Upload


class LocalShard:
    """A shard in this process, for tests and for comparison: it computes when its result is waited for."""

    def __init__(self, held: HeldShard) -> None:
        self.held = held

    def forward(self, images: Array, request: ShardRequest) -> Callable[[], ShardAnswer]:
        """See :class:`.sharded.Shard`."""
        return lambda: self.held.forward(images, request)

    def backward(self, ticket: int, logits: Array, watched: Array | None) -> Callable[[], Array | None]:
        """See :class:`.sharded.Shard`."""
        return lambda: self.held.backward(ticket, logits, watched)


def local_shards(
    uploads: Sequence[Upload],
    builders: Mapping[str, ModelBuilder],
    shards: int,
    *,
    fold: bool = True,
    precision: str = "float32",
) -> list[LoadedShard]:
    """Load uploads into shards of this process."""
    parts = []
    for part in divide_evenly(len(uploads), shards):
        held = HeldShard(builders, device="cpu", fold=fold, precision=precision)
        for upload in uploads[part]:
            held.add(upload)
        shard: Shard = LocalShard(held)
        parts.append(LoadedShard(shard, part.stop - part.start, held.close()))
    return parts
