"""A client with a pretrained model: it uploads the checkpoint and trains nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from strategies.core.checkpoints import read_checkpoint
from strategies.core.errors import UploadError


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read a state_dict that can be sent; see :func:`strategies.core.checkpoints.read_checkpoint`.

    Raises:
        UploadError: The file is missing, damaged, not a state_dict, or holds a tensor that numpy cannot represent.
    """
    found = read_checkpoint(path)
    for name, value in found.items():
        _refuse_unsendable(value, f"checkpoint {path}, tensor {name!r}")
    return found


def _refuse_unsendable(value: torch.Tensor, what: str) -> None:
    try:
        value.detach().numpy()
    except (RuntimeError, TypeError) as error:
        kind = f"{value.dtype}, {value.layout}"
        raise UploadError(f"{what} is {kind}: must be a dense tensor of a dtype that numpy has") from error
