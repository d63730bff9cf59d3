"""The vote of open-set classifiers, which predict for themselves whether a sample is unknown to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OpenSet(nn.Module):
    """The sum of the class probabilities over the members to which a sample is least unknown.

    FedOV (Diao et al., ICLR 2023), prediction: ``p_k = sm(z_k)`` is over C + 1 outputs, of which the last is "unknown".
    The v members with the smallest ``p_k,C`` vote, ties in their order. The prediction is the class c < C with the
    largest ``sum_k p_k,c``.

    Args:
        voters: v, the number of members that vote on each sample; 0, or more than M, for all.

    Raises:
        ValueError: ``voters`` is negative or not a single number.
    """

    voters: Tensor

    def __init__(self, voters: int | Tensor = 0) -> None:
        super().__init__()
        value = torch.as_tensor(voters, dtype=torch.int64)
        if value.dim() or value < 0:
            raise ValueError(f"voters is {value.tolist()}: must be a whole number from 0")
        self.register_buffer("voters", value.clone())

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C + 1] to the logarithm of the summed probabilities [B, C]."""
        # In log space throughout: a probability that underflows to 0 would have an infinite logarithm.
        log_shares = torch.log_softmax(logits, dim=2)
        order = log_shares[..., -1].argsort(dim=0, stable=True)
        # From the buffer, which may have been loaded; a slice by it would be a constant of an exported program.
        silent = (torch.arange(len(logits), device=logits.device) >= self.voters) & (self.voters > 0)
        ordered = log_shares[..., :-1].gather(0, order[..., None].expand(-1, -1, logits.shape[2] - 1))
        return ordered.masked_fill(silent[:, None, None], -torch.inf).logsumexp(0)
