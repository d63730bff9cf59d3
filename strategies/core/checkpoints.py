"""Checkpoint files of unknown origin: read as tensors alone, never as code."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from . import refusals
from .durable import atomic_write, sync_folder
from .errors import blaming, shorten_list
from .names import WRAPPERS, is_average
from .scan import Scan, has_suffix, log_once, scan, without_suffix

# What torch, safetensors and numpy read; compared without case.
SUFFIXES = (
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl", ".pickle", ".tar", ".pth.tar", ".pt.tar",
    ".ckpt.tar", ".npz",
)  # fmt: skip
# The files of a model in a folder of Hugging Face's, the first that there is; an index names the shards of one model.
_OF_FOLDER = (
    "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors",
    "diffusion_pytorch_model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin", "adapter_model.bin",
)  # fmt: skip
INDEX = ".index.json"
ALLOWED = "must be a .safetensors file, or a file that torch.save(model.state_dict()) wrote"

# The readers raise these on torn files and files of another format: torch's unpickler does not check its input.
_DAMAGES = (
    SafetensorError, pickle.UnpicklingError, struct.error, AssertionError, AttributeError, EOFError, LookupError,
    MemoryError, OSError, OverflowError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile,
)  # fmt: skip
# Training scripts keep the state_dict under these keys, beside the optimizer's; else under one that is none of
# :data:`_NO_MODELS`.
_STATES = (
    "state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "model_state",
    "model_weights", "state_dict_ema", "model_ema", "ema_state_dict", "ema",
)  # fmt: skip
_NO_MODELS = ("optim", "sched", "lr_", "scaler", "rng", "random", "loss", "criterion")
# Where files and modules keep the names of their classes, without case; the first that names them counts.
_CLASSES = ("id2label", "idx_to_class", "class_to_idx", "label2id", "classes", "class_names", "label_names")
_INSIDE = ("config", "hyper_parameters", "meta", "metadata", "dataset_meta", "args", "pretrained_cfg")
_CONFIG = "config.json"
_UNNAMED = re.compile(r"LABEL_\d+")  # Hugging Face's, of a model that names no classes
_CODE = re.compile(r"GLOBAL (\S+)")
_BOMB = "it is an archive that unpacks to"
_SHARDS = "its index names"
# Bytes. TorchScript archives compress small parts; the slack lets them through, to be refused as code later.
_SLACK = 2**24


# Words of file names by which training scripts tell the states of one training apart, and words that say nothing of
# whose model it is; after one of _TIMES a number is a time.
_TIMES = ("epoch", "epochs", "ep", "step", "steps", "iter", "iteration", "checkpoint", "ckpt")
_MOMENTS = ("best", "last", "latest", "final")
_KINDS = ("model", "weights", "state", "dict", "net")
# What Lightning writes into names: epoch=3-val_loss=0.25, and -v1 behind a name that was taken.
_SCORED = re.compile(r"(?:epoch|step|[a-z_/]*(?:loss|acc|auc|auroc|f1|score|metric)[a-z_/]*)=-?[\d.e]+|-v\d+$")


ADAPTER_CONFIG = "adapter_config.json"  # of PEFT's folders


def scan_checkpoints(folder: Path) -> Scan:
    """Look for checkpoints in a folder: files by their suffix, and subfolders that each hold one saved model.

    An index of shards is one checkpoint, and its shards are none.

    Raises:
        OSError: The folder cannot be read.
    """
    found = scan(folder, lambda path: has_suffix(path, (*SUFFIXES, INDEX)))
    shards = {shard for path in found.taken if has_suffix(path, (INDEX,)) for shard in _shards_of(path)}
    models = {path for path in found.others if path.is_dir() and _holds_model(path)}
    taken = tuple(sorted({*found.taken, *models} - shards))
    return replace(found, taken=taken, others=tuple(path for path in found.others if path not in models))


def no_checkpoints(found: Scan) -> str:
    """Return why a folder has no checkpoints, for an error: what else it holds, and where some lie below it."""
    left = f"; left out are {found.left_out}" if found.left_out else ""
    folders = (path for path in found.others if path.is_dir())
    deeper = (file for folder in folders for file in _files_in(folder))
    if (first := next(deeper, None)) is not None:
        below = first.relative_to(found.folder)
        left = f"; {below} lies in a folder below: must be directly in {found.folder}, as {below.parent}{first.suffix}"
    return f"{found.folder} holds no checkpoints: must be files that end in {', '.join(SUFFIXES)}{left}"


def _files_in(folder: Path) -> tuple[Path, ...]:
    """Return the checkpoints directly in a folder; none where it cannot be read, as one of another user."""
    try:
        return scan(folder, lambda path: has_suffix(path, SUFFIXES)).taken
    except OSError:
        return ()


def _holds_model(folder: Path) -> bool:
    """Say whether a folder holds one saved model; one that cannot be read does not."""
    try:
        return model_file(folder) is not None
    except OSError:
        return False


def model_file(folder: Path) -> Path | None:
    """Return the file of the one model that a folder of Hugging Face's holds, or its index of shards; None if none."""
    return next((path for name in _OF_FOLDER if (path := folder / name).is_file()), None)


def is_adapter(path: object) -> bool:
    """Say whether a path is PEFT's folder of a LoRA adapter."""
    return isinstance(path, str | Path) and (Path(path) / ADAPTER_CONFIG).is_file()


def client_name_of(path: Path) -> str:
    """Return the client name that a checkpoint's file or folder name gives, see :data:`.facts.CLIENT_NAME`, or "".

    A character that a client name must not hold becomes a dash; a name begins with a letter or a digit.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", without_suffix(path, SUFFIXES)).lstrip("._-")[:64]


def same_training_notes(paths: Iterable[Path]) -> list[str]:
    """Return a line for files of a folder that look like states of one training, such as its last and best."""
    groups: dict[tuple[Path, str], list[tuple[str, bool]]] = {}
    for path in paths:
        stem = without_suffix(path, SUFFIXES).lower()
        bare, dated = _SCORED.subn(" ", stem)
        words = re.findall(r"[^\W\d_]+|\d+", bare)
        timed = [word.isdigit() and before in _TIMES for before, word in zip(["", *words], words, strict=False)]
        rest = [word for word, time in zip(words, timed, strict=True) if not time]
        owner = " ".join(word for word in rest if word not in (*_TIMES, *_MOMENTS, *_KINDS))
        told = bool(dated) or not {*_TIMES, *_MOMENTS}.isdisjoint(rest)
        groups.setdefault((path.parent, owner), []).append((path.name, told))
    line = (
        "{} look like states of one training by their names, and each counts as a client: if they are, give one file "
        "per client"
    )
    return [
        line.format(shorten_list([name for name, _ in files]))
        for files in groups.values()
        if len(files) > 1 and any(told for _, told in files)
    ]


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read a state_dict; a torch file is opened with ``weights_only=True``, so it cannot run code.

    Args:
        path: A ``.safetensors`` file, a file that ``torch.save(model.state_dict())`` wrote, or an ``.npz`` of arrays
            by name. The state_dict may lie under a key of a training script's, see :func:`unwrap_state`. Also an index
            of shards, ``model.safetensors.index.json``, or a folder of Hugging Face's that holds one model.

    Returns:
        Name -> tensor, on the CPU, of any dtype; where what wraps a model stands before all names, it is left out.

    Raises:
        UploadError: The file is missing, damaged, or not a state_dict.
    """
    if path.is_dir():
        if (inside := model_file(path)) is None:
            held = [found.name for found in scan_checkpoints(path).taken]
            reason = f"is a folder, which holds {shorten_list(held)}" if held else "is a folder without a model"
            raise refusals.no_checkpoint(
                path, reason, "must be one file, or a folder with one of " + ", ".join(_OF_FOLDER)
            )
        path = inside
    if not path.is_file():
        raise refusals.no_checkpoint(path, "does not exist", ALLOWED)
    with _readable(path):
        content = _read(path)
    with blaming(f"checkpoint {path}"):
        found = unwrap_state(content, f"checkpoint {path}")
    if isinstance(found, Mapping):
        found = {key: value for key, value in found.items() if not _is_extra_state(key, value)}
    if not isinstance(found, Mapping) or not found or not all(_is_tensor(*item) for item in found.items()):
        raise refusals.no_checkpoint(path, f"holds {_kind(found)}", "must be a state_dict, name -> tensor")
    return _strip_prefix(found)


def read_classes(model: object) -> tuple[str, ...]:
    """Return the names of the classes that a model brings with it, in the order of their numbers; none if it has none.

    They lie under one of the usual names, such as ``id2label``, ``class_to_idx`` and ``classes``: in the
    ``config.json`` of a folder of Hugging Face's, beside the weights in a torch checkpoint, in the metadata of a
    safetensors file, or as an attribute of a module or of its ``config``.

    Args:
        model: A file, a folder, what ``torch.save`` wrote, or a module. A file that cannot be read names none: what
            reads its weights says why.

    Raises:
        UploadError: The ``config.json`` is damaged.
    """
    if isinstance(model, str | Path):
        return next(filter(None, map(_classes_in, _facts_beside(Path(model)))), ())
    if isinstance(model, Mapping):
        return _classes_in(model)
    own = {key: getattr(model, key, None) for key in (*_CLASSES, "config")}
    if not isinstance(own["config"], Mapping):
        own["config"] = {key: getattr(own["config"], key, None) for key in _CLASSES}
    return _classes_in(own)


def _facts_beside(path: Path) -> Iterator[Mapping[Any, Any]]:
    """Yield what lies beside the weights of a file or a folder."""
    file = model_file(path) if path.is_dir() else path
    if file is None or not file.is_file():
        return
    if file.name in _OF_FOLDER and (config := file.parent / _CONFIG).is_file():
        try:
            found = json.loads(config.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise refusals.no_checkpoint(config, "is damaged", "must be JSON, as save_pretrained writes it") from error
        yield found if isinstance(found, Mapping) else {}
    try:
        if is_safetensors(file):
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
            yield {key: _decoded(value) for key, value in metadata.items()}
        elif not has_suffix(file, (INDEX, ".npz")):
            content = _read(file, "meta")  # without the bytes of the weights
            yield content if isinstance(content, Mapping) else {}
    except _DAMAGES:
        return


def _decoded(text: str) -> Any:
    """Return what a text of a file's metadata says as JSON; a text that is none as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _classes_in(facts: Mapping[Any, Any]) -> tuple[str, ...]:
    named = {str(key).lower(): value for key, value in facts.items()}
    inside = [value for key in _INSIDE if isinstance(value := named.get(key), Mapping)]
    lists = [_in_order(named[key]) for key in _CLASSES if key in named]
    lists += [_in_order(found) for facts in inside for key, found in facts.items() if str(key).lower() in _CLASSES]
    return next(filter(None, lists), ())


def _in_order(classes: Any) -> tuple[str, ...]:
    """Return the names of a list, of number -> name or of name -> number; none of anything else."""
    words = list(classes) if isinstance(classes, list | tuple) else []
    if isinstance(classes, Mapping):
        pairs = [(key, name) if isinstance(name, str) else (name, key) for key, name in classes.items()]
        numbers = {int(number): name for number, name in pairs if str(number).isdecimal()}
        words = [numbers[k] for k in range(len(classes)) if k in numbers] if len(numbers) == len(classes) else []
        words = words if len(words) == len(classes) else []
    if not all(isinstance(word, str) for word in words) or all(_UNNAMED.fullmatch(word) for word in words):
        return ()
    return tuple(words)


def checkpoint_bytes(path: Path) -> int:
    """Return how many bytes of a disk a checkpoint takes, with all its shards."""
    file = model_file(path) or path if path.is_dir() else path
    parts = _shards_of(file) if has_suffix(file, (INDEX,)) else {file}
    return sum(part.stat().st_size for part in parts if part.is_file())


def _shards_of(index: Path) -> set[Path]:
    """Return the files that an index names, all beside it; none where it is damaged."""
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()
    return {index.parent / PureWindowsPath(str(name)).name for name in files}  # which divides at / as well


def _read_shards(index: Path, read: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a function reads in all shards that an index names."""
    shards = sorted(_shards_of(index))
    if not shards:
        raise ValueError(f"{_SHARDS} no 'weight_map'")
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ValueError(f"{_SHARDS} {shorten_list(missing)}, which are missing: must lie beside it")
    found: dict[str, Any] = {}
    for shard in shards:
        if other := other_kind(shard):
            raise ValueError(f"{_SHARDS} {shard.name}: {other}")
        found.update(read(shard))
    wanted = json.loads(index.read_bytes())["weight_map"]
    if lacking := sorted(set(wanted) - set(found)):
        raise ValueError(f"{_SHARDS} tensors that its files lack: {shorten_list(lacking)}")
    return found


_MAPPED = 4 * 2**20


class OpenFile(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file or its shards, each read when it is asked for.

    What was read of a mapped file counts as memory of the process, so it is opened anew after :data:`_MAPPED` bytes.

    Args:
        path: The file, or the index of shards.
        bare: Whether what wraps a model is left out where it stands before all names.

    Raises:
        UploadError: The file is missing or damaged.
    """

    def __init__(self, path: Path, *, bare: bool = True) -> None:
        if not path.is_file():
            raise refusals.no_checkpoint(path, "does not exist", ALLOWED)
        sharded = has_suffix(path, (INDEX,))
        with _readable(path):
            self._files: dict[str, Path] = _read_shards(path, _places_in) if sharded else _places_in(path)
        own = _strip_prefix(dict.fromkeys(self._files, torch.empty(0))) if bare else self._files
        self._names = dict(zip(own, self._files, strict=True))
        self._open: tuple[Path, Any] | None = None
        self._read = 0  # bytes of the open file

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        path = self._files[stored]
        with _readable(path):
            if self._open is None or self._open[0] != path:
                self._open, self._read = (path, _opened(path)), 0
            value: torch.Tensor = self._open[1].get_tensor(stored)
        self._read += value.nbytes
        if self._read >= _MAPPED:
            self._open = None
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name a file that cannot be read."""
    try:
        yield
    except _DAMAGES as error:
        raise refusals.no_checkpoint(path, f"cannot be read as weights: {_reason(error, path)}", ALLOWED) from error


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _places_in(path: Path) -> dict[str, Path]:
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def open_checkpoint(path: Path) -> Mapping[str, torch.Tensor]:
    """Return a checkpoint as :func:`read_checkpoint` does; of safetensors each tensor is read when it is asked for.

    Raises:
        UploadError: As there.
    """
    file = (model_file(path) or path) if path.is_dir() else path
    parts = (_shards_of(file) or {file}) if has_suffix(file, (INDEX,)) else {file}
    of_safetensors = all(part.is_file() and is_safetensors(part) for part in parts)
    return OpenFile(file) if of_safetensors else read_checkpoint(path)


SHARD = 5 * 10**9  # bytes of one file, as Hugging Face writes it


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], names: Iterable[str]) -> Path:
    """Write tensors as they come, so that no two of them are in memory at once.

    It is one file, ``model.safetensors``, or shards of at most :data:`SHARD` bytes and their index, each of which has
    its name only once it is whole.

    Args:
        folder: It must exist, without a model.
        tensors: Name and dense tensor.
        names: Of all tensors, in any order.

    Returns:
        The file, or the index.

    Raises:
        OSError: The disk refuses.
    """
    room = 256 + sum(len(json.dumps(name)) + 256 for name in names)
    parts = [_Shard(folder, room)]
    try:
        for name, value in tensors:
            data = memoryview(save({name: value.detach().cpu().contiguous()}))
            begin = 8 + int.from_bytes(data[:8], "little")
            if parts[-1].entries and parts[-1].size + len(data) - begin > SHARD:
                parts[-1].finish()
                parts.append(_Shard(folder, room))
            parts[-1].add(name, json.loads(bytes(data[8:begin]))[name], data[begin:])
        parts[-1].finish()
        paths = [folder / f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
        paths = paths if parts[1:] else [folder / "model.safetensors"]
        for part, path in zip(parts, paths, strict=True):
            part.path.replace(path)
    finally:
        for part in parts:
            part.file.close()
            part.path.unlink(missing_ok=True)
    sync_folder(folder)
    if len(parts) == 1:
        return paths[0]
    index = folder / f"model.safetensors{INDEX}"
    places = {name: path.name for part, path in zip(parts, paths, strict=True) for name in part.entries}
    facts = {"metadata": {"total_size": sum(part.size for part in parts)}, "weight_map": places}
    atomic_write(index, json.dumps(facts, indent=2).encode() + b"\n")
    return index


class _Shard:
    """A file of safetensors that grows tensor by tensor.

    Its header is written last, into a room that is left for it; blanks fill it up, as the format permits.
    """

    def __init__(self, folder: Path, room: int) -> None:
        self.path = folder / f".model.{uuid.uuid4().hex[:8]}.tmp"
        self.entries: dict[str, Any] = {}
        self.size, self._room = 0, room
        self.file = self.path.open("xb")
        self.file.seek(8 + room)

    def add(self, name: str, entry: dict[str, Any], data: memoryview) -> None:
        self.file.write(data)
        self.entries[name] = {**entry, "data_offsets": [self.size, self.size + len(data)]}
        self.size += len(data)

    def finish(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}).encode()
        self.file.seek(0)
        self.file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def _read(path: Path, device: str = "cpu") -> Any:
    """Return what a file holds, with the tensors of a torch checkpoint on a device; ``"meta"`` reads none of them."""
    if has_suffix(path, (INDEX,)):
        return _read_shards(path, _read)
    if is_safetensors(path):
        return load_file(path)
    _refuse_bomb(path)
    if has_suffix(path, (".npz",)):
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error names a file of another format
        return torch.load(path, weights_only=True, map_location=device)


def is_safetensors(path: Path) -> bool:
    """Say whether a file is one of safetensors, by its begin rather than its name; a damaged one is, by its name."""
    with path.open("rb") as file:
        head = file.read(9)
    if has_suffix(path, (".safetensors",)):
        return True
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def _refuse_bomb(path: Path) -> None:
    """Refuse an archive that unpacks to far more bytes than its own: torch.save compresses and repeats nothing."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > 2 * path.stat().st_size + _SLACK:
            raise ValueError(f"{_BOMB} {unpacked} bytes")


def unwrap_state(found: Any, where: str) -> Any:
    """Return the state_dict in what a training script saved; without one, itself.

    It is what lies under one of the usual keys, such as ``state_dict``, ``model_state_dict``, ``model`` and ``net``,
    else under the only key that holds name -> tensor. Of a model and its average over the training, as under
    ``model_ema``, it is the model; a line of the log says so, and what else is left out.

    Raises:
        UploadError: It holds several models.
    """
    for _ in range(len(_STATES)):  # a limit, because a pickled dict may contain itself
        if not isinstance(found, Mapping) or _is_state(found):
            break
        inside = [key for key in found if _may_be_model(key, found[key])]
        if not inside:  # what the usual key holds instead is named later
            inside = [key for key in _STATES if isinstance(found.get(key), Mapping)][:1]
        own = [key for key in inside if not is_average(key)] or inside
        own = [key for key in own if key in _STATES] or own
        if not own:
            break
        if len(own) > 1:
            raise refusals.several_models(own)
        if others := [repr(key) for key in inside if key != own[0]]:
            log_once(WARNING, f"{where}: the model is that under {own[0]!r}; left out are {shorten_list(others)}")
        found = found[own[0]]
    return found


def _may_be_model(key: object, value: object) -> bool:
    """Say whether an entry of a training script's checkpoint is a model, or a dict that holds one."""
    if not isinstance(key, str) or not isinstance(value, Mapping):
        return False
    if key in _STATES and any(isinstance(value.get(name), Mapping) for name in _STATES):
        return True
    return _is_state(value) and not key.lower().startswith(_NO_MODELS)


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Say whether a dict is name -> tensor, with numbers that a model may learn."""
    tensors = [each for key, each in value.items() if not _is_extra_state(key, each)]
    alike = all(isinstance(key, str) for key in value) and all(isinstance(each, torch.Tensor) for each in tensors)
    return alike and any(each.is_floating_point() or each.is_complex() for each in tensors)


def _strip_prefix(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefixes = tuple(f"{word}." for word in WRAPPERS)
    while (prefix := next((p for p in prefixes if all(key.startswith(p) for key in state)), None)) is not None:
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


def _is_extra_state(key: object, value: object) -> bool:
    """Say whether an entry is what a module without extra state stores for it: nothing."""
    return value is None and str(key).endswith("_extra_state")


def _is_tensor(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor)


def odd_form(value: torch.Tensor) -> str:
    """Return what keeps a tensor from being merged: no values, or a form without plain arithmetic; empty if nothing."""
    if value.is_meta:
        return "without values yet"
    if value.layout != torch.strided:
        return "sparse"
    if value.is_quantized or (value.dtype.is_floating_point and value.dtype.itemsize == 1):
        return f"quantised ({str(value.dtype).removeprefix('torch.')})"
    return ""


def _kind(found: object) -> str:
    if not isinstance(found, Mapping):
        return type(found).__name__
    if not found:
        return "an empty dict"
    key, value = next(item for item in found.items() if not _is_tensor(*item))
    return f"{type(found).__name__} in which {str(key)[:80]!r} is {type(value).__name__}"


# The first bytes of files that are often taken for weights, and what they are.
_OTHERS = (
    (b"version https://git-lfs", "it is a pointer of Git LFS, 'git lfs pull' fetches the file itself"),
    *((begin, "it is a web page, perhaps of a download that failed") for begin in (b"<!doctype", b"<html", b"<?xml")),
    (b"\x89hdf", "it is an HDF5 file, as Keras writes them"),
)


def other_kind(path: Path) -> str:
    """Return what a file is that holds neither weights nor data; empty if its first bytes do not tell."""
    try:
        with path.open("rb") as file:
            head = file.read(64).lstrip().lower()
    except OSError:
        return ""
    return next((what for begin, what in _OTHERS if head.startswith(begin)), "" if head else "it is empty")


def _reason(error: BaseException, path: Path) -> str:
    """Return the fault of a file. torch's own messages are not repeated: they advise running the file's code."""
    text = str(error)
    if other := other_kind(path):
        return other
    if (code := _CODE.search(text)) is not None:
        return f"it is a pickle that asks for {code[1][:120]!r}, which is not a tensor; none of its code was run"
    if text.startswith(_BOMB):
        return f"{text}, far more than its own size"
    if text.startswith(_SHARDS):
        return text
    if isinstance(error, SafetensorError | OSError):
        return (text.splitlines() or [type(error).__name__])[0][:200]
    if "TorchScript" in text:
        return "it is a TorchScript archive, which is code"
    return "it is damaged, or torch.save did not write it"
