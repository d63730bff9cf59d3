"""A client that has a trained model already: it uploads the checkpoint and trains nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from fl_app.checkpoints import read_checkpoint
from strategies.errors import UploadError


def checkpoint_path(template: str, *, client: str, partition_id: int) -> Path | None:
    """Return the client's checkpoint: ``{client}`` and ``{partition}`` are filled in; None if there is no template.

    Raises:
        UploadError: The template names something else.
    """
    if not template:
        return None
    try:
        return Path(template.format(client=client, partition=partition_id)).expanduser()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UploadError(
            f"client.checkpoint is {template!r}: allowed placeholders are {{client}} and {{partition}}"
        ) from error


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read a state_dict that can be sent; see :func:`fl_app.checkpoints.read_checkpoint`.

    Raises:
        UploadError: The file is not there, damaged, not a state_dict, or holds a tensor that numpy does not know.
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
        raise UploadError(f"{what} is {kind}: allowed are dense tensors of a dtype that numpy has") from error
