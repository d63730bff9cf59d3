"""Checkpoint files of unknown origin: read as tensors alone, never as code."""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from . import refusals

ALLOWED = "must be a .safetensors file, or a file that torch.save(model.state_dict()) wrote"

# The readers raise these on torn files and files of another format: torch's unpickler does not check its input.
_DAMAGES = (
    SafetensorError, pickle.UnpicklingError, struct.error, AssertionError, AttributeError, EOFError, LookupError,
    MemoryError, OSError, OverflowError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile,
)  # fmt: skip
# Training scripts keep the state_dict under these keys, beside the optimizer's.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
# DataParallel and torch.compile prefix every name with these.
_PREFIXES = ("module.", "_orig_mod.")
_CODE = re.compile(r"GLOBAL (\S+)")
_BOMB = "it is an archive that unpacks to"
# Bytes. TorchScript archives compress small parts; the slack lets them through, to be refused as code later.
_SLACK = 2**24


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read a state_dict; a torch file is opened with ``weights_only=True``, so it cannot run code.

    Args:
        path: A ``.safetensors`` file, or a file that ``torch.save(model.state_dict())`` wrote. The state_dict may lie
            under one of a training script's usual keys (``state_dict``, ``model_state_dict``, ``model``, ``net``).

    Returns:
        Name -> tensor, on the CPU, of any dtype; names without the prefix of ``DataParallel`` or ``torch.compile``.

    Raises:
        UploadError: The file is missing, damaged, or not a state_dict.
    """
    if not path.is_file():
        raise refusals.no_checkpoint(path, "does not exist", ALLOWED)
    try:
        found = _unwrap(_read(path))
    except _DAMAGES as error:
        raise refusals.no_checkpoint(path, f"cannot be read as weights: {_reason(error)}", ALLOWED) from error
    if not isinstance(found, Mapping) or not found or not all(_is_tensor(*item) for item in found.items()):
        raise refusals.no_checkpoint(path, f"holds {_kind(found)}", "must be a state_dict, name -> tensor")
    return _strip_prefix(found)


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return load_file(path)
    _refuse_bomb(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error names a file of another format
        return torch.load(path, weights_only=True, map_location="cpu")


def _refuse_bomb(path: Path) -> None:
    """Refuse an archive that unpacks to far more bytes than its own: torch.save compresses and repeats nothing.

    Raises:
        ValueError: The archive unpacks to too much; :func:`_reason` reads the message.
        BadZipFile: The archive is incomplete.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > 2 * path.stat().st_size + _SLACK:
            raise ValueError(f"{_BOMB} {unpacked} bytes")


def _unwrap(found: Any) -> Any:
    for _ in range(len(_WRAPPERS)):  # a limit, because a pickled dict may contain itself
        if not isinstance(found, Mapping):
            break
        inside = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inside is None:
            break
        found = inside
    return found


def _strip_prefix(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    while (prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in state)), None)) is not None:
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


def _is_tensor(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor)


def _kind(found: object) -> str:
    if not isinstance(found, Mapping):
        return type(found).__name__
    if not found:
        return "an empty dict"
    key, value = next(item for item in found.items() if not _is_tensor(*item))
    return f"{type(found).__name__} in which {str(key)[:80]!r} is {type(value).__name__}"


def _reason(error: BaseException) -> str:
    """Return the fault of a file. torch's own messages are not repeated: they advise running the file's code."""
    text = str(error)
    if (code := _CODE.search(text)) is not None:
        return f"it is a pickle that asks for {code[1][:120]!r}, which is no tensor; none of its code was run"
    if text.startswith(_BOMB):
        return f"{text}, far more than its own size"
    if isinstance(error, SafetensorError | OSError):
        return (text.splitlines() or [type(error).__name__])[0][:200]
    if "TorchScript" in text:
        return "it is a TorchScript archive, which is code"
    return "it is damaged, or torch.save did not write it"
