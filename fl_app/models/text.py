"""Models of texts, which take tokens as [B, 1, 1, L]; :mod:`fl_app.data.text` defines a token.

``text-bag`` replaces FENS's DistilBERT (Allouah et al., NeurIPS 2024), whose weights would need a download. It averages
the words' vectors, as in Joulin et al., Bag of Tricks for Efficient Text Classification, EACL 2017.
"""

from __future__ import annotations

import torch
from torch import nn

from ..data.text import BUCKETS
from .layers import chain

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
