"""An ensemble with cached member logits, for repeated scoring while only the combiner changes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from .ensemble import Ensemble

# Of cached logits; batches beyond it are evaluated again each time.
MOST_BYTES = 2**29


class Remembered(nn.Module):
    """Caches the members' logits by the content of a batch, for callers that pass the same batches repeatedly.

    Args:
        ensemble: Its members must not change; its combiner may.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self._known: dict[bytes, Tensor] = {}
        self._bytes = 0

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return combined logits [B, C] for normalised images [B, ch, H, W]; no gradient passes."""
        key = hashlib.blake2b(x.detach().cpu().contiguous().numpy().data, digest_size=16).digest()
        logits = self._known.get(key)
        if logits is None:
            logits = self.ensemble.member_logits(x)
            size = logits.numel() * logits.element_size()
            if self._bytes + size <= MOST_BYTES:
                self._known[key] = logits
                self._bytes += size
        return self.ensemble.combine(logits, x)
