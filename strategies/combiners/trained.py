"""The combiners that clients train together, in torch, with the same tensors as in numpy (:mod:`.aggregators`).

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, section 3 and Figure 8. Below,
z_i [B, C] are the logits of member i.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Replaces a share of zero, so that the product of many members' shares is not zero for every class. It is at most the
# share of one example in a million: a vote that never occurred counts more against a class than a rare one.
FLOOR = 1e-6


class Linear(nn.Module):
    """``sum_i w_i z_i + b``; the scalar b shifts all classes alike and changes no decision.

    Args:
        weight: w [M], of any sign.
        bias: b [1].
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        register(self, {"weight": (weight, 1), "bias": (bias, 1)})

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        return torch.einsum("m,mbc->bc", self.weight, logits) + self.bias


class PerClass(nn.Module):
    """``sum_i lambda_i * z_i``, one weight per member and class.

    Args:
        weight: lambda [M, C], of any sign.
    """

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        register(self, {"weight": (weight, 2)})

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        return torch.einsum("mc,mbc->bc", self.weight, logits)


class TwoLayers(nn.Module):
    """``W2 ReLU(W1 z + b1) + b2``, with z the concatenated logits of all members.

    Args:
        weight1: W1 [k, M C].
        bias1: b1 [k].
        weight2: W2 [C, k].
        bias2: b2 [C].
    """

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor

    def __init__(self, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> None:
        super().__init__()
        register(self, {"weight1": (weight1, 2), "bias1": (bias1, 1), "weight2": (weight2, 2), "bias2": (bias2, 1)})

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        hidden = F.relu(F.linear(logits.transpose(0, 1).flatten(1), self.weight1, self.bias1))
        return F.linear(hidden, self.weight2, self.bias2)


class Voting(nn.Module):
    """Polychotomous voting: the log-likelihood of every class under the members' votes, ``sum_i log P_i[r][vote_i]``.

    Every member votes for a class, and its earlier votes show how reliable it is: P_i[r][c] is the share of the held
    examples of class r that member i labels c. With equal priors and a benefit of one for the right class, the most
    likely class is ``argmax_r prod_i P_i[r][vote_i]``. The clients send counts, whose sum gives the shares of the
    pooled examples, as in the paper's code; the paper averages the clients' shares. A vote passes no gradient.

    Args:
        counts: Merged counts [M, C, C]: member, true class r, its vote c.
    """

    counts: Tensor

    def __init__(self, counts: Tensor) -> None:
        super().__init__()
        register(self, {"counts": (counts, 3)})

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        logs = self._shares().clamp(min=FLOOR).log()
        votes = logits.argmax(2)
        likelihoods = logs[torch.arange(len(logits), device=logits.device)[:, None], :, votes]
        return likelihoods.sum(0).float()

    def _shares(self) -> Tensor:
        """Return P [M, C, C]; a class without examples has the uninformative row ``1 / #seen`` over those with some."""
        counts = self.counts.double()
        seen = counts.sum((0, 2)) > 0
        seen = seen | ~seen.any()  # of no example every class is as if seen
        total = counts.sum(2, keepdim=True)
        nothing_known = (seen / seen.sum()).expand_as(counts)
        return torch.where(total > 0, counts / total.clamp(min=1), nothing_known.double())


def register(module: nn.Module, tensors: dict[str, tuple[Tensor, int]]) -> None:
    """Keep tensors as float32 buffers of a combiner.

    Args:
        tensors: Name -> the tensor and its required number of dimensions.

    Raises:
        ValueError: A tensor has another number of dimensions.
    """
    for name, (tensor, dimensions) in tensors.items():
        if tensor.dim() != dimensions:
            raise ValueError(f"{name!r} of {type(module).__name__} is {list(tensor.shape)}: must be {dimensions}-d")
        module.register_buffer(name, tensor.detach().to(torch.float32, copy=True))


def hold_as_buffers(module: nn.Module) -> None:
    """Make the parameters of a combiner's layers buffers, which no optimiser finds; their names and values stay."""
    for layer in module.modules():
        for name, value in [*layer.named_parameters(recurse=False)]:
            delattr(layer, name)
            layer.register_buffer(name, value.detach())
