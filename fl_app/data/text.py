"""Data sets of texts, each text an example of L tokens.

``ag-news``: AG's news topics (Zhang, Zhao, LeCun, Character-level Convolutional Networks for Text Classification, NIPS
2015), which FENS uses (Allouah et al., NeurIPS 2024, Figure 7). It has 120,000 + 7,600 headlines with their first
sentences, in four classes.

A backbone of texts reads them by its own tokens. For other models a token is a word's hash (Weinberger et al., Feature
Hashing for Large Scale Multitask Learning, ICML 2009). So no vocabulary has to be learnt or sent, and unknown words
need no special token. CRC-32 is the same on every machine; Python's own hash is not.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from strategies.core.errors import DataError

from .files import Remote, obtain

TEXTS = ("ag-news",)

CLASSES = ("world", "sports", "business", "science")
# Tokens are 1 .. BUCKETS - 1; 0 pads a text to LENGTH.
BUCKETS = 2**15
LENGTH = 64

PUBLISHED: Mapping[str, str] = {
    "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
    "test.csv": "d52ea96a97a2d943681189a97654912d",
}
ADDRESS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"

_WORD = re.compile(rb"[a-z0-9]+")


def open_news(split: str, root: Path, *, download: bool) -> tuple[torch.Tensor, list[str]]:
    """Open one half of AG-News.

    Args:
        split: ``"train"`` or ``"test"``.
        root: The folder that holds ``ag_news/train.csv``, or a part of it as ``ag_news/train_subset.csv``, and
            ``ag_news/test.csv``. A line is a class, 1 to 4, and one or several columns of text.

    Returns:
        The labels, int64 [N] from 0, and the texts, their columns joined.

    Raises:
        DataError: The file is missing or damaged; the message names its source.
    """
    folder, published = root / "ag_news", f"{split}.csv"
    subset = folder / f"{split}_subset.csv"
    if subset.exists() and not (folder / published).exists():
        return _read(subset)
    remote = Remote(f"{ADDRESS}/{published}", PUBLISHED[published])
    obtain("ag-news", folder, {published: remote}, download=download)
    return _read(folder / published)


def tokens(texts: Sequence[str]) -> torch.Tensor:
    """Return the hashes of each text's first words, of ASCII letters and digits, as int64 [B, 1, 1, L]."""
    found = np.zeros((len(texts), LENGTH), dtype=np.int64)
    for row, text in enumerate(texts):
        words = _WORD.findall(text.lower().encode())[:LENGTH]
        found[row, : len(words)] = [zlib.crc32(word) % (BUCKETS - 1) + 1 for word in words]
    return torch.from_numpy(found)[:, None, None]


def _read(file: Path) -> tuple[torch.Tensor, list[str]]:
    """Return the labels, int64 [N] from 0, and the texts, their columns joined."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [(int(number), " ".join(columns)) for number, *columns in csv.reader(lines)]
        labels = torch.tensor([number for number, _ in rows], dtype=torch.int64) - 1
        if not len(labels) or labels.min() < 0 or labels.max() >= len(CLASSES):
            raise ValueError(f"{len(labels)} rows, or other classes")
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"file {file} under data.root is damaged: {error}; a line must be '<class>,<text>' with a class of 1 to "
            f"{len(CLASSES)}"
        ) from error
    return labels, [text for _, text in rows]
