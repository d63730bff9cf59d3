"""The protocols of ensemble members that are held outside the method's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


@runtime_checkable
class HeldMembers(Protocol):
    """M frozen members that shards hold, in the order of the request.

    Attributes:
        statistics: Whether any member keeps batch-normalisation statistics.
    """

    statistics: bool

    def __len__(self) -> int:
        """Return M."""

    def logits(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Return the logits [m, B, C] for normalised images [B, ch, H, W]; gradients reach the images.

        Args:
            part: The members to evaluate; None for all.
        """

    def watched(self, what: str) -> AbstractContextManager[Callable[[], list[Tensor | None]]]:
        """Have the shards watch their members' layers during a block.

        Args:
            what: ``"statistics"`` or ``"features"``.

        Returns:
            A context that yields a callable. The callable returns the sum over all members for each forward pass since
            its last call.
        """


class Shards(Protocol):
    """The holder of an ensemble's members outside the method's process."""

    def hold(self, clients: Sequence[str], *, fold: bool, precision: str) -> HeldMembers:
        """Load some clients' uploads, in this order, in place of those held before.

        Raises:
            UploadError: An upload's weights do not fit its architecture.
        """
