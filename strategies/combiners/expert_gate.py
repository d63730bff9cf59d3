"""Linear gates that weigh the experts of a mixture: by the image's pixels, or by the predictions of all experts.

The mixture of experts is that of Jacobs, Jordan, Nowlan, Hinton, *Adaptive Mixtures of Local Experts*, Neural
Computation 1991. The gate on pixels is that of IntactOFL's published code (Zeng et al., ACM MM 2024). The gate on
predictions is this library's own: it sees no image, and so learns little that holds for synthetic images alone. With
zero weights all experts count the same in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trained import register


class PixelGate(nn.Module):
    """``(1/M) sum_k g_k(x) z_k``, g(x) = V x + b on flattened images x; the weights g have any sign and any sum.

    Args:
        weight: V [M, ch H W].
        bias: b [M].

    Raises:
        ValueError: The shapes do not match.
    """

    sees_input = True
    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        register(self, {"weight": (weight, 2), "bias": (bias, 1)})
        if len(bias) != len(weight):
            raise ValueError(f"a gate's weight is {list(weight.shape)} and its bias {list(bias.shape)}: must be "
                             "[M, ch H W] and [M]")  # fmt: skip

    def forward(self, logits: Tensor, x: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C], given the members' normalised input x [B, ch, H, W]."""
        return weighed(logits, pixel_gate(dict(self.named_buffers()), x))


def pixel_gate(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the weights ``g(x) = V x + b`` [B, M].

    Args:
        weights: The gate's ``weight`` [M, ch H W] and ``bias`` [M].
        x: Normalised images [B, ch, H, W].
    """
    return F.linear(x.flatten(1), weights["weight"], weights["bias"])


def weighed(logits: Tensor, gate: Tensor) -> Tensor:
    """Return ``(1/M) sum_k g_k z_k`` [B, C] for member logits z [M, B, C] and weights g [B, M]."""
    return torch.einsum("bm,mbc->bc", gate, logits) / len(logits)


class ExpertGate(nn.Module):
    """``log sum_k g_k sm(z_k)``, g = sm(W p + b), with p the concatenated predictions sm(z_k) of all members.

    Args:
        weight: W [M, M C].
        bias: b [M].

    Raises:
        ValueError: The shapes do not match.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        register(self, {"weight": (weight, 2), "bias": (bias, 1)})
        members, inputs = weight.shape
        if len(bias) != members or inputs % members:
            raise ValueError(f"a gate's weight is {list(weight.shape)} and its bias {list(bias.shape)}: must be "
                             "[M, M C] and [M]")  # fmt: skip

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to logits [B, C], whose softmax is the mixture's prediction."""
        return expert_mixture(dict(self.named_buffers()), logits)


def expert_mixture(weights: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Return ``log sum_k g_k sm(z_k)`` [B, C].

    Args:
        weights: The gate's ``weight`` [M, M C] and ``bias`` [M].
        logits: Of the members [M, B, C].
    """
    opinions = torch.log_softmax(logits, dim=2)
    gate = F.linear(opinions.exp().transpose(0, 1).flatten(1), weights["weight"], weights["bias"])
    return torch.logsumexp(torch.log_softmax(gate, dim=1).T[:, :, None] + opinions, dim=0)


def expert_divergence(logits: Tensor) -> Tensor:
    """Return ``mean_i (1/M) sum_k KL(p_k,i || (1/M) sum_j p_j,i)``, the Jensen-Shannon divergence of M predictions.

    Lin, *Divergence Measures Based on the Shannon Entropy*, 1991, with equal weights.

    Args:
        logits: Of the members [M, B, C].

    Returns:
        A scalar from 0, for equal predictions, to log M, if no two predictions share a class.
    """
    opinions = torch.log_softmax(logits, dim=2)
    middle = torch.logsumexp(opinions, dim=0) - math.log(len(logits))
    return (opinions.exp() * (opinions - middle)).sum(2).mean()
