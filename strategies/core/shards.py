"""Members of an ensemble that are elsewhere than the method's process: what it asks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


@runtime_checkable
class HeldMembers(Protocol):
    """M frozen members that shards hold, in the order in which they were asked for.

    Attributes:
        statistics: Whether a member keeps batch-normalisation statistics.
    """

    statistics: bool

    def __len__(self) -> int:
        """Return M."""

    def logits(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Return the logits [m, B, C] for normalised images [B, ch, H, W]; gradients reach the images.

        Args:
            x: The images.
            part: Which of the members; None for all.
        """

    def watched(self, what: str) -> AbstractContextManager[Callable[[], list[Tensor | None]]]:
        """Have the shards look at their members' layers during a block.

        Args:
            what: ``"statistics"`` or ``"features"``.

        Returns:
            A block that gives a callable, which returns what was seen since its last call: for each forward pass the
            sum over all members.
        """


class Shards(Protocol):
    """Where the members of an ensemble are, if not in the process of the method."""

    def hold(self, clients: Sequence[str], *, fold: bool, precision: str) -> HeldMembers:
        """Load some clients' uploads, in this order; what was held before is gone.

        Args:
            clients: Their names.
            fold: See :meth:`strategies.teacher.ensemble.Ensemble.from_uploads`.
            precision: The same.

        Raises:
            UploadError: An upload's weights do not fit its architecture.
        """
