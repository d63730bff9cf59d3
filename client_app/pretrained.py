"""A client that has a trained model already: it uploads the checkpoint and trains nothing."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strategies.errors import UploadError

# What the readers raise on files that are none of theirs, or torn: torch's unpickler trusts what it finds.
DAMAGES = (
    SafetensorError, pickle.UnpicklingError, struct.error, AssertionError, AttributeError, EOFError, LookupError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


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
    """Read a state_dict; a ``.pt`` file is opened with ``weights_only=True``, so that it cannot run code.

    Args:
        path: A ``.safetensors`` file, or what ``torch.save(model.state_dict())`` wrote.

    Raises:
        UploadError: The file is not there, damaged, or not a state_dict.
    """
    if not path.is_file():
        raise UploadError(f"checkpoint {path} is not there: allowed is a .safetensors or .pt file with a state_dict")
    try:
        found: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, weights_only=True, map_location="cpu")
        )
    except DAMAGES as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UploadError(f"checkpoint {path} cannot be read as weights: {reason[:200]}") from error
    # torch.save({"state_dict": ...}) is common: one level is unwrapped.
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise UploadError(f"checkpoint {path} holds {type(found).__name__}: allowed is a state_dict, name -> tensor")
    for name, value in found.items():
        _refuse_unsendable(value, f"checkpoint {path}, tensor {name!r}")
    return dict(found)


def _refuse_unsendable(value: torch.Tensor, what: str) -> None:
    try:
        value.detach().numpy()
    except (RuntimeError, TypeError) as error:
        kind = f"{value.dtype}, {value.layout}"
        raise UploadError(f"{what} is {kind}: allowed are dense tensors of a dtype that numpy has") from error
