"""A shard's end of the wire: holds members that the driver sends one by one. Imports no Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import OneShotError
from ..core.gpu import resolve_device
from ..core.processor import flush_subnormals
from ..method import Upload
from .task import unpack
from .worker import Failure

if TYPE_CHECKING:
    from ..core.facts import UploadFacts
    from ..teacher.shard import HeldShard
    from ..teacher.sharded import Array, ShardAnswer, ShardRequest


class ShardWorker:
    """Some members of an ensemble, replaced at every load."""

    def __init__(self) -> None:
        self._held: HeldShard | None = None

    def begin(
        self, builders: Mapping[str, bytes], *, device: str, threads: int, fold: bool, precision: str
    ) -> Failure | None:
        """Drop the members of before, and start to load new ones.

        Args:
            builders: Architecture -> the pickle of its builder.
            device: ``"auto"``, or a torch device of this process.
            threads: Torch threads of the passes.
            fold: See :meth:`strategies.teacher.ensemble.Ensemble.from_uploads`.
            precision: See the same.
        """
        import torch

        from ..teacher.shard import HeldShard

        torch.set_num_threads(threads)
        self._held = None  # free them before the next members come
        # The pickles come from our own driver, over Ray's own channel.
        opened = {name: pickle.loads(builder) for name, builder in builders.items()}  # noqa: S301
        try:
            self._held = HeldShard(opened, device=resolve_device(device), fold=fold, precision=precision)
        except OneShotError as error:
            return Failure.of(error)
        return None

    def add(self, facts: UploadFacts, read_packed: Callable[[], Any]) -> Failure | None:
        """Load one member.

        Args:
            facts: Its facts.
            read_packed: Returns its packed weights.
        """
        try:
            self._open.add(Upload(facts, lambda: unpack(read_packed())))
        except (OneShotError, RuntimeError) as error:
            return Failure.of(error)
        return None

    def close(self) -> bool:
        """Finish loading; return whether a member keeps batch-normalisation statistics."""
        return self._open.close()

    @flush_subnormals()
    def forward(self, images: Array, request: ShardRequest) -> ShardAnswer:
        """Make a forward pass, see :class:`strategies.teacher.sharded.Shard`."""
        return self._open.forward(images, request)

    @flush_subnormals()
    def backward(self, ticket: int, logits: Array, watched: Array | None) -> Array | None:
        """Make a backward pass, see :class:`strategies.teacher.sharded.Shard`."""
        return self._open.backward(ticket, logits, watched)

    @property
    def _open(self) -> HeldShard:
        if self._held is None:
            raise RuntimeError("a shard is begun before it is used")
        return self._held
