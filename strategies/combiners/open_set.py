"""The vote of open-set classifiers, which say themselves whether a sample is strange to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OpenSet(nn.Module):
    """The sum of the class probabilities of the members to whom a sample is the least unknown.

    FedOV (Diao et al., ICLR 2023), prediction: with ``p_k = sm(z_k)`` over C + 1 outputs, the last being "unknown", and
    the v members with the smallest ``p_k,C``, it is the class of the largest ``sum_k p_k,c``, c < C. Members that are
    equally sure count in their order.

    Args:
        voters: v, the members who vote on each sample; 0, or more than there are, for all.

    Raises:
        ValueError: It is negative.
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
        # By logarithms throughout: a probability that underflows to 0 has an infinite one.
        log_shares = torch.log_softmax(logits, dim=2)
        order = log_shares[..., -1].argsort(dim=0, stable=True)[: int(self.voters) or None]
        chosen = log_shares[..., :-1].gather(0, order[..., None].expand(-1, -1, logits.shape[2] - 1))
        return chosen.logsumexp(0)
