"""The server's labelled images, where it trains an aggregator itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import OptionError

if TYPE_CHECKING:
    import torch

    from ..method import Job


def require_labelled(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the server's labelled images.

    Raises:
        OptionError: It has none.
    """
    if job.labelled is None:
        raise OptionError(
            f"setting 'fens.aggregator' is {job.config.aggregator!r}, which is trained: without clients it needs a "
            "server with labelled images; else set 'average' or 'weighted'"
        )
    return job.labelled
