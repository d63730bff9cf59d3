"""Checkpoint files that somebody else wrote: read as tensors alone, never as code."""

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

from strategies.core.errors import UploadError

ALLOWED = "must be a .safetensors file, or what torch.save(model.state_dict()) wrote"

# What the readers raise on files that are none of theirs, or torn: torch's unpickler trusts what it finds.
_DAMAGES = (
    SafetensorError, pickle.UnpicklingError, struct.error, AssertionError, AttributeError, EOFError, LookupError,
    MemoryError, OSError, OverflowError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile,
)  # fmt: skip
# Under these keys training scripts keep the state_dict, beside an optimizer's.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
# DataParallel and torch.compile put these before every name.
_PREFIXES = ("module.", "_orig_mod.")
_CODE = re.compile(r"GLOBAL (\S+)")
_BOMB = "it is an archive that unpacks to"
# Bytes: of TorchScript archives, which are refused for what they are, small parts are compressed.
_SLACK = 2**24


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read a state_dict; a torch file is opened with ``weights_only=True``, so that it cannot run code.

    Args:
        path: A ``.safetensors`` file, or what ``torch.save(model.state_dict())`` wrote, bare or under one of the usual
            keys of a training script (``state_dict``, ``model_state_dict``, ``model``, ``net``).

    Returns:
        Name -> tensor, on the CPU, of any dtype; names without the prefix of ``DataParallel`` or ``torch.compile``.

    Raises:
        UploadError: The file is not there, damaged, or not a state_dict.
    """
    if not path.is_file():
        raise UploadError(f"checkpoint {path} is not there: {ALLOWED}")
    try:
        found = _unwrapped(_read(path))
    except _DAMAGES as error:
        raise UploadError(f"checkpoint {path} cannot be read as weights: {_reason(error)}: {ALLOWED}") from error
    if not isinstance(found, Mapping) or not found or not all(_is_tensor(*item) for item in found.items()):
        raise UploadError(f"checkpoint {path} holds {_kind(found)}: must be a state_dict, name -> tensor")
    return _without_prefix(found)


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return load_file(path)
    _refuse_bomb(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file that is none of torch's, the error says it
        return torch.load(path, weights_only=True, map_location="cpu")


def _refuse_bomb(path: Path) -> None:
    """Refuse an archive that unpacks to far more than it is: torch.save compresses nothing, and stores nothing twice.

    Raises:
        ValueError: It does; the message is for :func:`_reason`.
        BadZipFile: It is no whole archive.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > 2 * path.stat().st_size + _SLACK:
            raise ValueError(f"{_BOMB} {unpacked} bytes")


def _unwrapped(found: Any) -> Any:
    for _ in range(len(_WRAPPERS)):  # no deeper: a pickled dict may hold itself
        if not isinstance(found, Mapping):
            break
        inside = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inside is None:
            break
        found = inside
    return found


def _without_prefix(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    """Return what is wrong with a file. Not in torch's words: they advise to run the code in it."""
    text = str(error)
    if (code := _CODE.search(text)) is not None:
        return f"it is a pickle that asks for {code[1][:120]!r}, which is no tensor; nothing of it was run"
    if text.startswith(_BOMB):
        return f"{text}, far more than it has"
    if isinstance(error, SafetensorError | OSError):
        return (text.splitlines() or [type(error).__name__])[0][:200]
    if "TorchScript" in text:
        return "it is a TorchScript archive, which is code"
    return "it is damaged, or no file of torch.save"
