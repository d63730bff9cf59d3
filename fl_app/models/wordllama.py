"""The packaged backbone of texts: the mean of a text's token vectors, read from the files of the package WordLlama.

The package itself is never imported, for it wants packages that nothing here needs. Its vectors have 256 numbers for
each of 32,000 byte-pair tokens and derive from the embeddings of Llama 2. Whether the licence of those reaches them
is not settled by the package's own, MIT. So it is an extra, and no other extra has it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from strategies.core.errors import OptionError

from ..data.text import BUCKETS
from . import chain

# Models of texts, which take tokens as [B, 1, 1, L]; :mod:`fl_app.data.text` defines a token.
#
# ``text-bag`` replaces FENS's DistilBERT (Allouah et al., NeurIPS 2024), whose weights would need a download. It
# averages the words' vectors, as in Joulin et al., Bag of Tricks for Efficient Text Classification, EACL 2017.


WIDTH = 64


def text_bag(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:  # noqa: ARG001  any length is its own
    """Build embedding, mean over the words, 64-64-C with ReLU, for texts [B, 1, 1, L]; logits [B, C]."""
    return chain(
        words=MeanOfWords(BUCKETS, WIDTH),
        fc1=nn.Linear(WIDTH, WIDTH),
        relu1=nn.ReLU(inplace=True),
        fc2=nn.Linear(WIDTH, num_classes),
    )


class MeanOfWords(nn.Module):
    """The mean of the vectors of a text's words; token 0 is padding, and a text without words gives zero.

    That holds for any vector of the padding: a private upload has noise on all its weights.

    Args:
        tokens: Number of tokens, 0 included.
        width: Length of a vector.
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, 1, 1, L], of any type that holds them exactly, to [B, width]."""
        tokens = x.flatten(1).long()
        known = (tokens != 0)[..., None]
        total: torch.Tensor = (self.embedding(tokens) * known).sum(1)
        return total / known.sum(1).clamp(min=1)


NAME = "wordllama (l2_supercat_256, mean of token vectors)"
TOKENS, FEATURES = 32_000, 256
LENGTH = 512  # tokens of a text; the longest of AG-News has 338
VECTORS = Path("weights") / "l2_supercat_256.safetensors"
TOKENIZER = Path("tokenizers") / "l2_supercat_tokenizer_config.json"  # in spite of its name a whole tokenizer
MISSING = "setting 'features.backbone' is 'wordllama', but {} is not installed: pip install '.[features-text]'"


def tokenizer_digest() -> str:
    """Return the sha256 of the tokenizer's file.

    Raises:
        OptionError: A package is missing.
    """
    return hashlib.sha256(_file(TOKENIZER).read_bytes()).hexdigest()


def tokens(texts: Sequence[str]) -> torch.Tensor:
    """Return each text's first tokens without special ones, int64 [B, 1, 1, 512]; 0 stands for no token."""
    found = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, encoded in enumerate(_tokenizer().encode_batch_fast(list(texts), add_special_tokens=False)):
        ids = encoded.ids[:LENGTH]
        found[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return found[:, None, None]


def build() -> nn.Module:
    """Return the frozen module: tokens [B, 1, 1, L] -> features [B, 256]; a text without tokens has zeros."""
    module = MeanOfTokens(TOKENS, FEATURES)
    vectors = load_file(_file(VECTORS))["embedding.weight"].float()
    vectors[0] = 0.0  # of the unknown token, which no text has, for every byte has a token; 0 pads
    module.load_state_dict({"embedding.weight": vectors})
    return module.eval()


class MeanOfTokens(MeanOfWords):
    """The mean of the vectors of a text's tokens; the columns that no text of a batch reaches cost no time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, 1, 1, L] to [B, d]."""
        rows = x.flatten(1)
        return super().forward(rows[:, (rows != 0).any(0)])


@functools.cache
def _tokenizer() -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a client has one thread
    path = _file(TOKENIZER)
    return importlib.import_module("tokenizers").Tokenizer.from_file(str(path))


def _file(name: Path) -> Path:
    """Return a file of the package, without an import of it."""
    found = {package: importlib.util.find_spec(package) for package in ("wordllama", "tokenizers")}
    if missing := [package for package, spec in found.items() if spec is None]:
        raise OptionError(MISSING.format(" and ".join(missing)))
    places = found["wordllama"].submodule_search_locations or []  # type: ignore[union-attr]
    files = [path for path in (Path(place) / name for place in places) if path.is_file()]
    if not files:
        raise OptionError(f"setting 'features.backbone' is 'wordllama', whose package lacks {name}: must be 0.4")
    return files[0]
